"""Plans for people and for CI: no decisions, no torch.

table     text for the terminal        dot, mermaid   pictures of the program
html      one self-contained page      explain        why a choice, and where its figures come from
diff      what differs in two plans    check, formats findings for CI
"""
