"""Tensors between the ranks of a pipeline: received ahead of need, sent while the next action computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.errors import message_lost
from autopar.runtime.pipeline_ranks import PipelineRanks
from autopar.runtime.routes import Message, Routes

AHEAD = 2
"""Actions ahead of need that a receive is posted: one is computing, the next one's tensors travel meanwhile."""

Deliver = Callable[[Message, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class _Sent:
    message: Message
    work: Any
    tensor: torch.Tensor
    """Kept alive until the peer has it."""


class Mailbox:
    """The messages of one step of one rank.

    On a pipeline that is `ordered`, sends and receives are issued in the one order that all ranks share, as a channel
    without tags needs (NCCL); else a receive is posted whenever its action is near.
    """

    def __init__(self, routes: Routes, pipeline: PipelineRanks, ahead: int = AHEAD) -> None:
        self._routes = routes
        self._pipeline = pipeline
        self._ordered = pipeline.ordered
        self._ahead = ahead
        self._near = 0
        self._next = 0
        self._posted: dict[int, tuple[Any, torch.Tensor]] = {}
        self._asked: set[int] = set()
        self._sent: list[_Sent] = []

    def receive(self, position: int, deliver: Deliver) -> None:
        """Hand over what the action at `position` of the rank's row reads; post receives of those behind it.

        Raises:
            PeerLostError: the peer stopped, or took longer than the group's timeout.
        """
        self._post_near(position)
        for message in self._routes.receives[position]:
            work, buffer = self._posted.pop(message.tag)
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(message, error, sending=False) from error
            self._release(message)
            deliver(message, buffer)

    def send(self, position: int, values: Mapping[str, torch.Tensor]) -> None:
        """Send what the action at `position` made for other ranks.

        Raises:
            PeerLostError: the peer stopped.
        """
        for message in self._routes.sends[position]:
            if self._ordered:
                self._issue_before(message)
            tensor = values[message.transfer.value].contiguous()
            try:
                work = dist.isend(tensor, self._peer(message), group=self._pipeline.messages, tag=message.tag)
            except RuntimeError as error:
                raise self._lost(message, error, sending=True) from error
            self._sent.append(_Sent(message, work, tensor))

    def finish(self) -> None:
        """Wait until all that was sent has arrived.

        Raises:
            PeerLostError: a peer stopped, or took longer than the group's timeout.
        """
        for each in self._sent:
            self._wait(each)
        self._sent.clear()

    def _post_near(self, position: int) -> None:
        end = min(position + self._ahead + 1, len(self._routes.row))
        while self._near < end:
            for message in self._routes.receives[self._near]:
                if self._ordered and not self._issue_before(message):
                    return
                self._post(message)
            self._near += 1

    def _issue_before(self, message: Message) -> bool:
        """Post the receives that come before `message` in the shared order; return whether it is its turn."""
        order = self._routes.order
        if message.tag in self._asked:
            return True
        while order[self._next] is not message:
            earlier = order[self._next]
            if self._is_send(earlier):
                return False
            self._next += 1
            self._post(earlier)
        self._next += 1
        return True

    def _post(self, message: Message) -> None:
        if message.tag in self._asked:
            return
        self._asked.add(message.tag)
        transfer = message.transfer
        device = self._pipeline.ranks.device
        buffer = torch.empty(transfer.shape, dtype=getattr(torch, transfer.dtype), device=device)
        try:
            work = dist.irecv(buffer, self._peer(message), group=self._pipeline.messages, tag=message.tag)
        except RuntimeError as error:
            raise self._lost(message, error, sending=False) from error
        self._posted[message.tag] = work, buffer

    def _release(self, received: Message) -> None:
        """Let go of what the peer had read before it made `received`; waiting for that takes no time."""
        peer, made_at = self._peer(received), received.sent_at
        kept = []
        for each in self._sent:
            if self._peer(each.message) == peer and each.message.read_at <= made_at:
                self._wait(each)
            else:
                kept.append(each)
        self._sent = kept

    def _wait(self, sent: _Sent) -> None:
        try:
            sent.work.wait()
        except RuntimeError as error:
            raise self._lost(sent.message, error, sending=True) from error

    def _is_send(self, message: Message) -> bool:
        return message.source_rank == self._routes.rank

    def _peer(self, message: Message) -> int:
        return self._pipeline.rank_at(message.target_rank if self._is_send(message) else message.source_rank)

    def _lost(self, message: Message, error: RuntimeError, *, sending: bool) -> Exception:
        action, stage = (
            (message.source, message.transfer.target) if sending else (message.target, message.transfer.source)
        )
        return message_lost(
            self._peer(message), stage, message.transfer.value, action.words, str(error), sending=sending
        )
