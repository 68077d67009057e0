"""How `bench` takes times, and the copies of cold weights that take turns."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jax_fp8.bench import operands, timing
from jax_fp8.bench.timing import Timed, Times


def test_statistics_of_samples():
    times = Times((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (times.median, times.best, times.quartiles) == (3.0, 1.0, (2.0, 4.0))
    assert Times((7.0,)).quartiles == (7.0, 7.0)
    assert times.quartiles == tuple(np.percentile(times.seconds, [25, 75]))


class Clock:
    """A clock that only calls and sleeps move."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.log.append("sleep")

    def takes(self, name, seconds):
        def call():
            self.now += seconds
            self.log.append(name)

        return Timed(call)


def rounds(clock, contenders, **options):
    options = {"repeats": 3, "budget_seconds": 100.0, "pause_seconds": 0.25} | options
    return timing.round_robin(contenders, clock=clock, sleep=clock.sleep, **options)


def test_contenders_take_turns_with_a_pause_before_each_that_does_not_count():
    clock = Clock()
    found = rounds(clock, {"a": clock.takes("a", 1.0), "b": clock.takes("b", 2.0)})
    assert clock.log == ["sleep", "a", "sleep", "b"] * 3
    assert found == {"a": Times((1.0,) * 3), "b": Times((2.0,) * 3)}


def test_the_budget_ends_rounds_but_not_the_first_three():
    clock = Clock()
    found = rounds(clock, {"a": clock.takes("a", 1.0)}, repeats=50, budget_seconds=10.0)
    assert len(found["a"].seconds) == 3  # it alone takes a quarter of the budget, then sits out
    found = rounds(clock, {"a": clock.takes("a", 0.001)}, repeats=50, budget_seconds=0.01)
    assert len(found["a"].seconds) == timing.MIN_ROUNDS


def test_a_slow_contender_sits_out_and_the_others_go_on():
    clock = Clock()
    both = {"slow": clock.takes("slow", 6.0), "fast": clock.takes("fast", 0.1)}
    found = rounds(clock, both, repeats=8, budget_seconds=10.0)
    assert len(found["slow"].seconds) == 1
    assert len(found["fast"].seconds) == 8


def test_a_sample_of_many_calls_is_the_time_of_one():
    clock = Clock()
    timed = dataclasses.replace(clock.takes("a", 0.5), calls=10)
    assert timed.sample(clock) == pytest.approx(0.5)
    assert clock.log == ["a"] * 10
    assert Timed(lambda: 3.0, calls=4, own_clock=True).sample(clock) == 3.0


def test_what_comes_before_a_sample_is_not_timed():
    clock = Clock()
    timed = dataclasses.replace(clock.takes("a", 0.5), before=clock.takes("touch", 7.0).call)
    assert timed.sample(clock) == 0.5
    assert clock.log == ["touch", "a"]


def test_a_rotation_calls_with_the_copy_that_it_touched():
    memory = [np.full(10_000, i, np.uint8) for i in range(3)]
    rotation = operands.Rotation(
        lambda lhs, weights: (lhs, weights), "lhs", "abc", itertools.cycle(range(3)), memory
    )
    assert rotation() == ("lhs", "a")  # without a touch it takes the next one itself
    rotation.touch()
    assert rotation() == ("lhs", "b")
    assert [rotation()[1] for _ in range(3)] == ["c", "a", "b"]
    assert [page.tolist() for page in rotation._pages] == [[i] * 3 for i in range(3)]
