"""How likely a block must be used again to be written, by what is left of the budget."""

from __future__ import annotations

import pytest

from kvtier.config_values import AdmissionRule
from kvtier.errors import ConfigError
from kvtier.policy.admission import Admission, least_probability


def test_the_less_is_left_the_likelier_it_must_be_within_bounds() -> None:
    shares = [-0.5, 0.0, 0.3, 0.75, 0.9, 1.0, 2.0]
    found = [least_probability(share) for share in shares]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[3], found[-1]) == pytest.approx((0.6, 0.2, 0.05))


def test_configuration_knows_the_rules_and_refuses_lots_for_each_block() -> None:
    rule = AdmissionRule()
    assert [rule.check("nvme.admission", one.value) for one in Admission] == list(Admission)
    with pytest.raises(ConfigError, match=r"nvme\.admission is 'coin'.*behind a hole"):
        rule.check("nvme.admission", "coin")
