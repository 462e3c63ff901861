"""The proof holds, sees what is broken, and says so; and the prover itself is no rubber stamp."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from click.testing import CliRunner

from specbuild.cli import main
from specbuild.proof.cases import CHAIN, Case
from specbuild.proof.drafts import WITH_REPLACEMENT, Table
from specbuild.proof.enumeration import Branches, ReusedDraw, outcomes
from specbuild.proof.schemes import Scheme
from specbuild.prove import TOLERANCE, Certificate, Finding, continuations, distance, examine, prove
from specrun.distribution import Distribution
from specrun.random import Stream
from specrun.rules import RULES, ChainRejection, TreeRejectionWithoutReplacement


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return prove(quick=True)


def test_every_lossless_rule_emits_the_targets_law(certificate):
    assert [f for f in certificate.proved if not f.lossless] == []
    assert max(f.total_variation for f in certificate.proved) <= TOLERANCE
    named = {f.scheme.split(",")[0] for f in certificate.proved}
    assert named == {rule.name for rule in RULES if rule.lossless}


def test_every_broken_variant_is_detected(certificate):
    assert len(certificate.controls) == 12
    assert [f for f in certificate.controls if not f.detected] == []
    assert certificate.holds


def test_typical_acceptance_is_measured_as_lossy(certificate):
    assert all(f.total_variation > 0.01 for f in certificate.lossy) and certificate.lossy


def test_acceptance_orders_the_rules_as_the_papers_do(certificate):
    accepted = {(f.scheme, f.case): f.accepted for f in certificate.proved}
    for (scheme, case), mean in accepted.items():
        if scheme == "block-verification":
            assert mean >= accepted["chain-rejection", case] - 1e-12, case
        if scheme == "chain-rejection" and "p = q" in case:
            assert mean == pytest.approx(3)


def test_a_rule_that_loses_its_residual_fails_the_proof(monkeypatch):
    """The proof looks at the shipped code: break that, and it fails."""
    monkeypatch.setattr(Distribution, "excess", lambda self, other, scale=1.0: (self, 1.0))
    p = Table(3, 1)
    for rule in (ChainRejection(), TreeRejectionWithoutReplacement()):
        found = examine(Scheme("broken", rule, WITH_REPLACEMENT), Case("x", p, Table(3, 2, p), CHAIN, length=3))
        assert not found.lossless and found.total_variation > 1e-3


def test_enumeration_is_exact_on_a_known_process():
    """Two coins, the second biased by the first: exact weights, every outcome once, sum 1."""

    def run(chance):
        first = chance.accept(0.25, 1.0, 0, 0)
        law = Distribution(np.array([3, 5, 8]), np.array([0.5, 0.0 if first else 0.25, 0.5], np.float32))
        return first, chance.choose(law, 0, Stream.TARGET)

    found = dict(outcomes(run))
    quarter, fifth = Fraction(1, 4), Fraction(1, 5)
    expected = {
        (True, 3): quarter / 2,
        (True, 8): quarter / 2,
        (False, 3): 3 * quarter * 2 * fifth,
        (False, 5): 3 * quarter * fifth,
        (False, 8): 3 * quarter * 2 * fifth,
    }
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(float(p), abs=1e-15) for key, p in expected.items())


def test_certain_decisions_do_not_branch_and_reuse_is_an_error():
    chance = Branches([])
    assert chance.accept(0.5, 0.25, 1, 1) and not chance.accept(0.0, 0.25, 1, 2) and chance.accept(0.1, 0.0, 1, 3)
    assert [len(options) for options, _ in chance.choices] == [1, 1, 1]
    with pytest.raises(ReusedDraw, match="position 1, stream ACCEPT, index 2"):
        chance.accept(0.5, 1.0, 1, 2)


def test_distance_counts_missing_mass():
    assert distance({(0,): 0.5}, {(0,): 0.5, (1,): 0.5}) == 0.25
    assert distance({(0,): 1.0}, {(1,): 1.0}) == 1.0


def test_the_targets_own_law_sums_to_one_and_ends_at_eos():
    p = Table(3, 1)
    case = Case("x", p, p, CHAIN, eos=1)
    law = dict(continuations(case, ()))
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert all(1 not in tokens[:-1] and (len(tokens) == 4 or tokens[-1] == 1) for tokens in law)


def test_the_command_prints_and_writes_the_certificate(monkeypatch, tmp_path, certificate):
    monkeypatch.setattr("specbuild.commands.prove.prove", lambda quick, progress: certificate)
    path = tmp_path / "certificate.json"
    result = CliRunner().invoke(main, ["prove", "--quick", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "12 of 12 broken variants detected" in result.output
    written = json.loads(path.read_text())
    assert written["holds"] and written["tolerance"] == 1e-12
    assert set(written["proved"][0]) >= {"scheme", "case", "total_variation", "accepted", "outcomes"}


def test_the_command_fails_when_the_proof_does(monkeypatch, certificate):
    bad = Finding("chain-rejection", "x", 0.1, 1.0, 4)
    failing = Certificate([bad], certificate.lossy, certificate.controls)
    monkeypatch.setattr("specbuild.commands.prove.prove", lambda quick, progress: failing)
    result = CliRunner().invoke(main, ["prove"])
    assert result.exit_code == 1 and "0 of 1 lossless" in result.output


def test_an_undetected_control_voids_the_certificate(certificate):
    good = examine(Scheme("fine", ChainRejection(), WITH_REPLACEMENT), Case("x", Table(2, 1), Table(2, 2), CHAIN))
    assert good.lossless
    assert not Certificate(certificate.proved, [], [good]).holds
