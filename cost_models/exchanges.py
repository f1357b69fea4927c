"""What tokens send to experts on other nodes: a copy for each expert, or one for each node that has some of them."""

from __future__ import annotations


def sent_share(nodes: int, chosen: int, groups: int = 1, reached: int = 1) -> float:
    """Return what of a token's copies cross nodes where it goes once to each node and is copied there.

    `chosen` experts of a token are spread evenly over `nodes`; where the experts are in as many `groups` as nodes, or
    more, its experts are in `reached` of the groups. Over what one copy an expert sends, which is at least as much.
    DeepEP and HybridEP do so (https://github.com/deepseek-ai/DeepEP); DeepSeek-AI, "DeepSeek-V3" (arXiv:2412.19437),
    section 3.2.2, of groups.
    """
    if nodes < 2:
        return 1.0
    among = min(nodes, reached) if groups >= nodes else nodes
    on_nodes = among * (1.0 - (1.0 - 1.0 / among) ** chosen)
    return on_nodes / chosen
