"""Deadlines do not move when the machine's clock is set."""

import inspect

from areal_ray.core.clock import SteadyClock
from areal_ray.gateway.session_routes import make_sessions_app
from areal_ray.gateway.sessions import Sessions


def test_a_clock_that_is_set_an_hour_forward_or_back_moves_no_deadline():
    wall_s, steady_s = 1_700_000_000.0, 5.0
    clock = SteadyClock(lambda: wall_s, lambda: steady_s)
    assert clock() == 1_700_000_000.0
    for jump_s in (3600.0, -7200.0):
        wall_s += jump_s
        steady_s += 1.0
    assert clock() == 1_700_000_002.0


def test_sessions_live_by_it_and_not_by_the_machines_clock():
    for user in (Sessions, make_sessions_app):
        clock = inspect.signature(user).parameters["clock"].default
        assert isinstance(clock, SteadyClock)
