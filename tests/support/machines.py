"""How long state machines run: short and the same each time in `make test`, long in torture."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from tests.support.forms import is_torture


def machine_settings(*, examples: int, steps: int, shrinks: bool = True) -> settings:
    """`examples` runs of `steps` steps; 40 times as many, and fresh ones, in the full form.

    Where shrinking takes longer than a test may, a failure is shown as it was found.
    """
    full = is_torture()
    phases = tuple(Phase) if shrinks else (Phase.explicit, Phase.generate)
    return settings(
        phases=phases,
        max_examples=examples * 40 if full else examples,
        stateful_step_count=steps * 2 if full else steps,
        derandomize=not full,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
