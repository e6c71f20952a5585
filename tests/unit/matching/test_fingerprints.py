"""The bodies on record, by target, release and patch."""

from __future__ import annotations

from trl_hotfix.catalogue import loading, on_record
from trl_hotfix.matching import fingerprints, gates, inherited
from trl_hotfix.matching.fingerprints import Bodies

TARGET = "trl.trainer.made_up:Trainer.loss"
BODIES = Bodies(
    ("1.0.0", "1.1.0", "1.2.0"),
    {
        TARGET: {
            "c1:0": {"releases": ["1.0.0", "1.1.0"], "is": {"some-patch": "buggy"}},
            "c1:1": {"releases": ["1.2.0"], "is": {"some-patch": "fixed"}},
        }
    },
)


def test_a_body_has_a_verdict_for_each_patch() -> None:
    assert [BODIES.verdict("some-patch", TARGET, body) for body in ("c1:0", "c1:1")] == ["buggy", "fixed"]
    assert BODIES.verdict("another-patch", TARGET, "c1:0") is None


def test_an_unknown_body_or_target_has_no_verdict() -> None:
    assert BODIES.verdict("some-patch", TARGET, "c1:2") is None
    assert BODIES.verdict("some-patch", TARGET, None) is None
    assert BODIES.verdict("some-patch", "trl.gone:Trainer.loss", "c1:0") is None


def test_a_release_has_one_body_at_a_target() -> None:
    assert [BODIES.at(TARGET, release) for release in BODIES.releases] == ["c1:0", "c1:0", "c1:1"]
    assert BODIES.at(TARGET, "9.0.0") is None
    assert BODIES.releases_with(TARGET, "c1:0") == ("1.0.0", "1.1.0")
    assert BODIES.releases_with(TARGET, "c1:2") == ()


def verdicts_of(known: fingerprints.Inherited, patch: str) -> set[str | None]:
    return {verdicts.get(patch) for verdicts in known["is"].values()}


STEP = "trl.trainer.made_up:Trainer.training_step"
OF = "transformers:Trainer.training_step"


def test_a_target_is_inherited_in_some_releases_and_trls_own_in_others() -> None:
    old, new = (inherited.body_of(OF, version) for version in ("5.2.0", "5.23.0"))
    own: dict[str, dict[str, fingerprints.Body]] = {STEP: {"c1:0": {"releases": ["1.2.0"], "is": {}}}}
    known: dict[str, fingerprints.Inherited] = {
        STEP: {"of": OF, "by": ["1.0.0", "1.1.0"], "is": {str(old): {"some-patch": "buggy"}}}
    }
    bodies = Bodies(("1.0.0", "1.1.0", "1.2.0"), own, known)
    assert [bodies.at(STEP, release) for release in bodies.releases] == [None, None, "c1:0"]
    assert [bodies.at(STEP, release, "5.2.0") for release in bodies.releases] == [old, old, "c1:0"]
    assert [bodies.inherits(STEP, release) for release in bodies.releases] == [OF, OF, None]
    assert [bodies.verdict("some-patch", STEP, body) for body in (old, new, "c1:0")] == ["buggy", None, None]
    assert [bodies.releases_with(STEP, body) for body in (old, new)] == [("1.0.0", "1.1.0"), ()]


def test_every_shipped_target_is_on_record() -> None:
    on_record = fingerprints.bodies()
    names = {target.name for patch in loading.load() for target in patch.targets}
    assert names <= on_record.targets.keys() | on_record.inherited.keys()


def test_where_a_patch_is_proven_its_bodies_are_known_to_have_the_bug() -> None:
    unknown = []
    for patch in loading.load():
        known = fingerprints.bodies_for(patch.id)
        for release in on_record.proven_on(patch):
            verdicts = {
                known.verdict(patch.id, target.name, known.at(target.name, release))
                for target in gates.targets_for(patch, release)
                if known.inherits(target.name, release) is None
            }
            # What is inherited has a body in each transformers, and the bug in those that the patch requires.
            verdicts |= {
                "buggy" if "buggy" in verdicts_of(known.inherited[target.name], patch.id) else None
                for target in gates.targets_for(patch, release)
                if known.inherits(target.name, release) is not None
            }
            # A target that a release has not yet is no reason to leave the others alone.
            if verdicts - {"buggy"}:
                unknown.append((patch.id, release, verdicts))
    assert unknown == []
