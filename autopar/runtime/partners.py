"""Frozen parameters that a loop writes itself, whose partners in another branch are on another pipeline stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch import nn

from autopar.runtime.errors import partner_elsewhere
from autopar.warning import warn


@dataclass
class Partners:
    """Tells of a teacher that is a running mean of a student, where stages have parted them.

    A rank's `parameters()` are those of its stages. Pairs that a loop makes by their order are then others, and of
    equal shapes none of torch's checks says so. What a loop writes shows in the version of a frozen parameter.
    """

    pairs: tuple[tuple[nn.Parameter, str, str], ...]
    """Frozen parameters, their names, and those of their partners on other ranks."""

    _versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, elsewhere: Collection[str]) -> Partners:
        """Return the frozen parameters of this rank with a partner among the names of other ranks' parameters.

        Those that have a trained one like them on this rank are left out.
        """
        frozen = [(each, name) for name, each in model.named_parameters() if not each.requires_grad]
        away = {form: other for other in elsewhere for form in _forms(other)} if frozen else {}
        here = {form for name, each in model.named_parameters() if each.requires_grad for form in _forms(name)}
        frozen = [(each, name) for each, name in frozen if here.isdisjoint(_forms(name))]
        found = [(each, name, next((away[f] for f in _forms(name) if f in away), "")) for each, name in frozen]
        return cls(tuple(each for each in found if each[2]))

    def check(self) -> None:
        """Warn, once, if one was written since the last call."""
        now = [each._version for each, _, _ in self.pairs]
        before, self._versions = self._versions or now, now
        for (_, name, other), was, is_now in zip(self.pairs, before, now, strict=True):
            if was != is_now:
                self.pairs, self._versions = (), []
                warn(partner_elsewhere(name, other))
                return


def _forms(name: str) -> Iterable[tuple[str, ...]]:
    """Yield the name with each word of it left open: `student.norm.bias` and `teacher.norm.bias` share a form."""
    words = name.split(".")
    for place, word in enumerate(words[:-1]):
        if not word.isdigit():
            yield (*words[:place], "*", *words[place + 1 :])
