"""Orders of a step on random graphs: they break nothing, fit, and are never slower than what they began with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.tasks import COMPUTE, Task, breaks
from autopar.search.overlap import END, _Line, _readers, schedule
from autopar.simulate.streams import held_bytes, peak_bytes, replay


@st.composite
def steps(draw: st.DrawFn) -> list[Task]:
    """Return tasks in an order in which they can run: forward then backward, on up to three streams and two links."""
    tasks: list[Task] = []
    count = draw(st.integers(2, 24))
    turn = draw(st.integers(1, count))
    for place in range(count):
        gathers = draw(st.sampled_from(["", "", "", f"parameter {place}"]))
        stream = (
            draw(st.sampled_from([COMPUTE, COMPUTE, "dp", "tp"]))
            if not gathers
            else draw(st.sampled_from(["dp", "ag"]))
        )
        earlier = [i for i in range(place) if not gathers or not tasks[i].communicates]
        reads = tuple(draw(st.sets(st.sampled_from(earlier), max_size=3))) if earlier else ()
        issue_s = 0.0 if stream == COMPUTE else draw(st.sampled_from([0.0, 0.25]))
        tasks.append(
            Task(
                name=f"t{place}",
                seconds=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
                phase="forward" if place < turn else "backward",
                reads=reads,
                stream=stream,
                link="" if stream == COMPUTE else draw(st.sampled_from(["node", "rack"])),
                issue_s=issue_s,
                within_s=draw(st.sampled_from([0.0, issue_s])),
                makes_bytes=draw(st.integers(0, 5)),
                kept=draw(st.booleans()),
                gathers=gathers,
                kind=-1 if stream == COMPUTE else draw(st.integers(0, 3)),
            )
        )
    return tasks


@given(steps(), st.integers(0, 40))
def test_a_schedule_breaks_no_dependency_fits_and_is_not_slower(tasks: list[Task], limit: int):
    given_order = range(len(tasks))

    found = schedule(tasks, replay, held_bytes, limit)

    assert breaks(tasks, found.order) == ""
    assert peak_bytes(tasks, found.order) <= max(limit, peak_bytes(tasks, given_order))
    assert replay(tasks, found.order).step_s <= replay(tasks, given_order).step_s * (1 + 1e-12)


@given(steps(), st.integers(0, 40))
def test_equal_tasks_give_equal_orders_so_that_all_ranks_issue_alike(tasks: list[Task], limit: int):
    assert schedule(tasks, replay, held_bytes, limit) == schedule(list(tasks), replay, held_bytes, limit)


@given(steps())
def test_a_step_takes_its_computation_at_least_and_everything_one_by_one_at_most(tasks: list[Task]):
    found = replay(tasks, range(len(tasks)))

    compute_s = sum(task.seconds for task in tasks if not task.communicates)
    communication_s = sum(task.seconds + task.issue_s for task in tasks if task.communicates)
    assert compute_s <= found.step_s + 1e-9
    assert found.step_s <= compute_s + communication_s + 1e-9
    assert abs(found.step_s - compute_s - sum(found.exposed_s)) < 1e-9


def compute(name: str, *reads: int, seconds: float = 1.0, held: int = 0) -> Task:
    return Task(name=name, seconds=seconds, phase="forward", reads=reads, makes_bytes=held)


def gather(name: str, seconds: float = 1.0, held: int = 10) -> Task:
    return Task(
        name=name, seconds=seconds, phase="forward", stream="dp", link="node", gathers=name, makes_bytes=held, kind=0
    )


def test_a_link_is_busy_while_computation_pays_for_what_it_carries():
    first = replace(gather("a"), issue_s=0.5, within_s=0.375)
    tasks = [first, replace(first, name="b"), compute("x", 0, 1)]

    found = replay(tasks, range(3))

    assert found.end_s == (1.125, 2.125, 3.125)
    assert found.exposed_s == (0.5 + 0.125, 0.5 + 1.0, 0.0)


def test_a_gather_is_issued_behind_the_operators_before_its_use():
    tasks = [gather("a"), compute("x", 0), gather("b"), compute("y", 1, 2), gather("c"), compute("z", 3, 4)]

    found = schedule(tasks, replay, held_bytes, limit_bytes=100)

    assert replay(tasks, range(6)).step_s == 6.0
    assert replay(tasks, found.order).step_s == 4.0
    assert set(found.ahead) == {2, 4}


def test_without_memory_nothing_is_issued_ahead_and_the_schedule_says_how_many_would_be():
    tasks = [gather("a"), compute("x", 0), gather("b"), compute("y", 1, 2)]

    found = schedule(tasks, replay, held_bytes, limit_bytes=0)

    assert found.order == (0, 1, 2, 3)
    assert (dict(found.ahead), found.hindered) == ({}, 1)


def test_a_weight_gradient_runs_while_the_input_gradient_is_reduced():
    reduce = Task(name="r", seconds=1.0, phase="forward", stream="tp", link="node", reads=(1,), kind=0)
    tasks = [compute("dw"), compute("dx"), reduce, compute("next", 2)]

    found = schedule(tasks, replay, held_bytes, limit_bytes=0)

    assert found.order == (1, 2, 0, 3)
    assert dict(found.deferred) == {0: 3}
    assert replay(tasks, found.order).step_s == 3.0


def test_a_gather_makes_way_for_a_sum_that_computation_waits_for():
    total = Task(name="r", seconds=1.0, phase="forward", stream="tp", link="node", reads=(0,), kind=1)
    behind = [compute("y", 1), compute("z", 2), compute("v", 3)]
    tasks = [compute("x"), total, *behind, gather("w", seconds=2.0), compute("u", 4, 5)]

    found = schedule(tasks, replay, held_bytes, limit_bytes=100)

    assert dict(found.ahead) == {5: 3}
    assert replay(tasks, found.order).step_s == 6.0
    assert replay(tasks, (5, 0, 1, 2, 3, 4, 6)).step_s == 7.0


def test_a_weight_gradient_is_made_while_the_last_and_largest_one_is_reduced():
    small = Task(name="r", seconds=0.5, phase="forward", stream="dp", link="node", reads=(0,), kind=0, reduces=True)
    large = replace(small, name="s", seconds=2.0, reads=(3,), kind=1)
    tasks = [compute("dw"), small, compute("dx"), compute("table", 2), large]

    found = schedule(tasks, replay, held_bytes, limit_bytes=0)

    assert replay(tasks, range(5)).step_s == 5.0
    assert found.order == (2, 3, 4, 0, 1)
    assert dict(found.deferred) == {0: END}
    assert replay(tasks, found.order).step_s == 4.5


def test_streams_of_one_link_share_its_bandwidth_and_those_of_two_do_not():
    def step_s(link: str) -> float:
        pair = [
            Task(name=n, seconds=1.0, phase="forward", stream=n, link=at, kind=0)
            for n, at in (("a", "node"), ("b", link))
        ]
        return replay(pair, (0, 1)).step_s

    assert step_s("node") == 2.0
    assert step_s("rack") == 1.0


def test_a_gather_of_a_view_of_a_parameter_is_issued_ahead_with_its_view():
    view = compute("view", seconds=0.0)
    tasks = [compute("first"), compute("second", 0), view, replace(gather("w"), reads=(2,)), compute("use", 1, 3)]

    found = schedule(tasks, replay, held_bytes, 100)

    assert found.ahead == {3: 0}
    assert [tasks[each].name for each in found.order] == ["view", "w", "first", "second", "use"]


def test_a_gather_goes_before_a_reduction_that_it_would_have_to_wait_for():
    reduction = replace(gather("dw", seconds=2.0), gathers="", reads=(1,), kind=1)
    tasks = [
        compute("a", seconds=2.0),
        compute("b", 0),
        reduction,
        compute("c", 1, seconds=1.5),
        compute("d", 3, seconds=1.5),
        gather("w"),
        compute("use", 4, 5),
    ]

    found = schedule(tasks, replay, held_bytes, 100)

    assert found.order.index(5) < found.order.index(2)
    assert replay(tasks, found.order).step_s == 7.0


def test_what_a_collective_made_is_not_gathered_ahead_of_it():
    moved = replace(gather("first"), gathers="")
    tasks = [compute("a"), moved, replace(gather("w"), reads=(1,)), compute("use", 0, 2)]

    assert schedule(tasks, replay, held_bytes, 100).ahead == {}


def test_what_is_beside_a_task_stays_where_it_was_deferred_from():
    tasks = (
        Task(name="a", seconds=1.0, phase="forward", makes_bytes=1, beside_bytes=100),
        Task(name="b", seconds=1.0, phase="forward", beside_bytes=10),
        Task(name="c", seconds=1.0, phase="forward", beside_bytes=10),
    )

    assert held_bytes(tasks, (0, 1, 2)) == [101, 10, 10]
    assert held_bytes(tasks, (1, 2, 0)) == [10, 10, 11]


def counted(tasks: list[Task], order: list[int]) -> list[int]:
    """Return what `held_bytes` does, task by task."""
    owner, curve, latest, beside = list(range(len(tasks))), [], -1, tasks[order[0]].beside_bytes
    for index, task in enumerate(tasks):
        owner[index] = index if task.memory_of is None else owner[task.memory_of]
    for at, index in enumerate(order):
        task = tasks[index]
        if index > latest and not task.communicates:
            latest, beside = index, task.beside_bytes
        held = min(beside, task.beside_bytes)
        for one in order[: at + 1]:
            mine = [each for each in range(len(tasks)) if owner[each] == one]
            later = any({one, *mine} & {*tasks[each].reads, each} for each in order[at:])
            kept = any(tasks[each].kept for each in mine)
            held += tasks[one].makes_bytes if owner[one] == one and (later or kept) else 0
        curve.append(held)
    return curve


@given(steps(), st.data())
def test_what_is_held_is_what_a_count_of_each_task_finds(tasks: list[Task], data: st.DataObject):
    views = data.draw(st.lists(st.booleans(), min_size=len(tasks), max_size=len(tasks)))
    kept = data.draw(st.sets(st.integers(0, len(tasks) - 1)))
    beside = data.draw(st.lists(st.integers(-5, 50), min_size=len(tasks), max_size=len(tasks)))
    tasks = [
        replace(
            task,
            memory_of=task.reads[0] if view and task.reads else None,
            kept=index in kept,
            beside_bytes=size,
        )
        for index, (task, view, size) in enumerate(zip(tasks, views, beside, strict=True))
    ]

    for order in (list(range(len(tasks))), list(schedule(tasks, replay, held_bytes, 10**9).order)):
        assert held_bytes(tasks, order) == counted(tasks, order)


@given(steps(), st.integers(0, 23), st.integers(0, 24))
def test_what_follows_from_a_task_is_what_a_look_at_all_behind_it_finds(tasks: list[Task], first: int, end: int):
    first = min(first, len(tasks) - 1)
    line = _Line(tasks, _readers(tasks), list(range(len(tasks))))

    wanted = {first}
    for each in range(first + 1, min(end, len(tasks))):
        wanted |= {each} if wanted.intersection(tasks[each].reads) else set()
    spent_s = sum(tasks[each].seconds for each in wanted if not tasks[each].communicates)

    assert line.following(first, end, spent_s, END) == wanted
    assert line.following(first, end, spent_s, max(wanted)) is None
    assert spent_s == 0.0 or line.following(first, end, 0.9 * spent_s, END) is None


def test_memory_is_counted_of_no_order_that_is_slower(monkeypatch: pytest.MonkeyPatch):
    counted: list[int] = []
    monkeypatch.setattr("autopar.simulate.streams.held_bytes", lambda tasks, _: counted.append(len(tasks)) or [7])
    step = replay([Task(name="t", seconds=1.0, phase="forward")], [0])

    assert (step.step_s, counted) == (1.0, [])
    assert (step.peak_bytes, step.peak_bytes, counted) == (7, 7, [1])
