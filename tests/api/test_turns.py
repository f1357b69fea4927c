"""Whose turn it is among trials: what found plans tell of estimates, and both kinds of programs in sight."""

from __future__ import annotations

from typing import Any, cast

import pytest

from autopar.api.kinds import varied
from autopar.api.solving import Waiting
from autopar.api.turns import Turn, alternating, next_turn, off_by, turn_s
from autopar.search.meshes import MeshAxis, Role
from autopar.search.trials import Trial


def _sharded(ranks: int, *, depth: int = 1) -> Trial:
    return Trial((MeshAxis("dp_shard", ranks),), depth=depth)


def _split(ranks: int) -> Trial:
    return Trial((MeshAxis("tp", ranks),))


def test_pipelines_and_the_whole_program_take_turns_in_the_order_of_each():
    whole, staged = [_sharded(8), _sharded(4), _sharded(2)], [_sharded(2, depth=4)]

    assert alternating([*whole, *staged]) == [whole[0], staged[0], *whole[1:]]
    assert alternating([*staged, *whole]) == [whole[0], staged[0], *whole[1:]]
    assert alternating(whole) == whole


def test_a_kind_whose_plans_were_slower_than_estimated_comes_later_by_that():
    off = {_sharded(8): 1.5, _sharded(4): 1.4, _sharded(8, depth=2): 3.0}

    assert turn_s(_sharded(2), 1.0, off) == pytest.approx(1.4 * turn_s(_sharded(2), 1.0, {}))
    assert turn_s(_split(2), 1.0, off) == turn_s(_split(2), 1.0, {})


def test_a_kind_whose_plans_were_faster_than_estimated_comes_no_earlier():
    assert turn_s(_sharded(2), 1.0, {_sharded(8): 0.5}) == turn_s(_sharded(2), 1.0, {})


def test_trials_on_more_axes_come_later():
    one, two = _sharded(8), Trial((MeshAxis("dp_replicate", 2), MeshAxis("dp_shard", 4)))

    three = Trial((MeshAxis("dp_shard", 2), MeshAxis("cp", 2), MeshAxis("tp", 2)))

    first, second, third = (turn_s(each, 1.0, {}) for each in (one, two, three))
    assert first < second < third
    assert third - second > 2 * (second - first)  # these take several times as long to relax
    assert turn_s(three, 1.0, {}, short=True) > third
    assert turn_s(two, 1.0, {}, short=True) == second


def _cut(depth: int, microbatches: int) -> Trial:
    return Trial((MeshAxis("microbatch", microbatches), MeshAxis("dp_shard", 2)), depth=depth)


def test_a_pipeline_says_nothing_of_fewer_stages_or_more_micro_batches_a_stage():
    """Of these an estimate is off by less: a size that fits badly ruled out the next smaller one, which fits."""
    known = {_cut(4, 16): 1.2}

    easier = [_cut(2, 8), _cut(4, 32), _cut(8, 64)]
    harder = [_cut(4, 16), _cut(4, 8), _cut(8, 32)]

    assert [off_by(each, known) for each in easier] == [None, None, None]
    assert [off_by(each, known) for each in harder] == [1.2, 1.2, 1.2]
    assert turn_s(easier[0], 1.0, known) == turn_s(easier[0], 1.0, {}) < turn_s(harder[0], 1.0, known)


_ANY = cast("Any", None)


def waiting(place: int, bound_s: float, role: Role, *, ended: bool = True) -> Turn:
    trial = Trial((MeshAxis("dp_shard", 2), MeshAxis(role, 2)))
    return bound_s, place, Waiting(trial, _ANY, _ANY, _ANY, bound_s, bound_s, ended)


FREE, SETTLED = waiting(0, 1.0, "free"), waiting(1, 1.2, "dp_replicate")


def test_what_has_no_free_axes_is_solved_first_until_there_is_a_plan():
    assert next_turn([FREE, SETTLED], late=False, planned=False) == SETTLED
    assert next_turn([FREE, SETTLED], late=False, planned=True) == FREE


def test_the_quickest_of_several_is_that_of_the_least_bound():
    slower = waiting(2, 1.5, "dp_replicate")

    assert next_turn([FREE, slower, SETTLED], late=False, planned=False) == SETTLED


def test_what_took_too_long_to_relax_is_not_solved_ahead_of_others():
    late = waiting(1, 1.2, "dp_replicate", ended=False)

    assert next_turn([FREE, late], late=False, planned=False) == FREE


def test_trials_that_are_not_relaxed_keep_their_turn():
    unknown: Turn = (0.5, 2, Trial((MeshAxis("dp_shard", 4),)))

    assert next_turn([FREE, SETTLED, unknown], late=False, planned=False) == unknown


def test_until_there_is_a_plan_what_fits_less_often_waits_for_the_others():
    """Pipelines whose memory estimates thought too little of took all the time, one after the other."""
    staged: Turn = (1.0, 0, _sharded(2, depth=4))
    whole: Turn = (1.1, 1, _sharded(8))

    assert next_turn([staged, whole], late=False, planned=False, failed={}) == staged
    assert next_turn([staged, whole], late=False, planned=False, failed={True: 1}) == whole
    assert next_turn([staged, whole], late=False, planned=False, failed={True: 1, False: 1}) == staged
    assert next_turn([staged, whole], late=False, planned=True, failed={True: 1}) == staged
    assert next_turn([staged], late=False, planned=False, failed={True: 1}) == staged


def test_pipelines_of_a_kind_do_not_take_the_place_of_the_whole_program():
    staged = [_cut(depth, 16) for depth in (2, 4, 8, 16)]

    assert varied([*staged, _sharded(8)]) == [*staged[:3], _sharded(8), staged[3]]
