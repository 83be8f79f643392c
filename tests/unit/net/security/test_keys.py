"""Keys and their records: who gets in, and which record of a key wins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import BadRequest, KeysUnknown, Unauthenticated
from tandem.net.security.key_ring import KeyRing
from tandem.net.security.keys import (
    TOMBSTONE_S,
    KeyRecord,
    create,
    record_of,
    revoke,
    rotate,
    update,
)
from tandem.net.security.limits import NO_LIMITS, Limits, changed

NOW = 1_000_000.0
UNKNOWN = "not belong to this cluster|the API key is empty"


def ring_of(*records: KeyRecord, age_max_s: float = 0.0) -> KeyRing:
    ring = KeyRing(age_max_s=age_max_s)
    ring.merge(records, now=NOW)
    ring.synced_at = NOW
    return ring


def test_a_key_is_its_tenants_and_its_record_holds_no_secret():
    key = create("acme", "user", now=NOW)
    assert ring_of(key.record).authenticate(key.text, now=NOW) == key.record
    assert key.text.split("-", 2)[2] not in repr(key.record)
    assert (key.record.tenant, key.record.role, key.record.version) == ("acme", "user", 1)


def test_an_operator_may_choose_the_text_of_a_key():
    record = record_of("sk-my-own-key", now=NOW)
    assert ring_of(record).authenticate("sk-my-own-key", now=NOW) == record
    assert "sk-my-own-key" not in repr(record)
    assert record.role == "operator"
    with pytest.raises(Unauthenticated, match=UNKNOWN):
        ring_of(record).authenticate("sk-my-own-kez", now=NOW)
    # The id of a key in the form of a generated one is the key's own.
    assert record_of("tandem-ab-secret", now=NOW).key_id == "ab"


@pytest.mark.parametrize(
    "text", ["", "tandem", "tandem-", "tandem-x", "tandem-x-", "sk-1234-5678", "tandem-nobody-x"]
)
def test_what_is_no_key_is_refused(text):
    with pytest.raises(Unauthenticated, match=UNKNOWN):
        ring_of(create("acme", "user", now=NOW).record).authenticate(text, now=NOW)


def test_a_wrong_secret_is_refused_without_a_word_about_the_key():
    key = create("acme", "user", now=NOW)
    other = create("acme", "user", now=NOW)
    mixed = f"tandem-{key.record.key_id}-{other.text.split('-', 2)[2]}"
    for record in (key.record, revoke(key.record, now=NOW)):
        with pytest.raises(Unauthenticated, match=UNKNOWN):
            ring_of(record).authenticate(mixed, now=NOW)


def test_a_key_expires():
    key = create("acme", "user", now=NOW, expires_at=NOW + 10)
    ring = ring_of(key.record)
    ring.authenticate(key.text, now=NOW + 9.9)
    with pytest.raises(Unauthenticated, match="expired"):
        ring.authenticate(key.text, now=NOW + 10)


def test_a_rotated_key_works_with_both_secrets_until_the_grace_ends():
    old = create("acme", "user", now=NOW)
    new = rotate(old.record, now=NOW, grace_s=60)
    ring = ring_of(old.record, new.record)
    for key in (old, new):
        assert ring.authenticate(key.text, now=NOW + 59).key_id == old.record.key_id
    ring.authenticate(new.text, now=NOW + 60)
    with pytest.raises(Unauthenticated):
        ring.authenticate(old.text, now=NOW + 60)


def test_a_rotation_without_grace_ends_the_old_secret_at_once():
    old = create("acme", "user", now=NOW)
    ring = ring_of(rotate(old.record, now=NOW, grace_s=0).record)
    with pytest.raises(Unauthenticated):
        ring.authenticate(old.text, now=NOW)


def test_a_tombstone_has_no_secret_to_find():
    key = create("acme", "user", now=NOW)
    tombstone = revoke(rotate(key.record, now=NOW, grace_s=60).record, now=NOW)
    assert (tombstone.digest, tombstone.previous_digest, tombstone.version) == ("", "", 3)
    with pytest.raises(Unauthenticated):
        ring_of(tombstone).authenticate(key.text, now=NOW)


def test_an_old_record_brings_no_key_back_and_is_answered_with_the_newer_one():
    key = create("acme", "user", now=NOW)
    tombstone = revoke(key.record, now=NOW)
    ring = ring_of(key.record, tombstone)
    assert ring.merge([key.record], now=NOW) == [tombstone]
    with pytest.raises(Unauthenticated):
        ring.authenticate(key.text, now=NOW)


def test_a_revocation_beats_a_rotation_made_at_the_same_moment():
    key = create("acme", "user", now=NOW)
    rotated = rotate(key.record, now=NOW, grace_s=60)
    tombstone = revoke(key.record, now=NOW)
    for order in ([rotated.record, tombstone], [tombstone, rotated.record]):
        assert ring_of(*order).records[key.record.key_id] == tombstone


@given(st.permutations(range(6)))
def test_rings_agree_in_whatever_order_they_learn(order):
    history = [create("acme", "user", now=NOW).record]
    for step in range(3):
        history.append(rotate(history[-1], now=NOW + step, grace_s=60).record)
    history += [revoke(history[-1], now=NOW), rotate(history[1], now=NOW, grace_s=0).record]
    ring = ring_of(*(history[i] for i in order))
    assert ring.records[history[0].key_id] == history[4]


def test_tombstones_are_kept_until_30_days_after_expiry():
    key = create("acme", "user", now=NOW, expires_at=NOW + 10)
    tombstone = revoke(key.record, now=NOW)
    ring = ring_of(tombstone)
    ring.merge([], now=NOW + 10 + TOMBSTONE_S - 1)
    assert ring.records
    ring.merge([key.record], now=NOW + 10 + TOMBSTONE_S)
    assert not ring.records
    forever = ring_of(revoke(create("acme", "user", now=NOW).record, now=NOW))
    forever.merge([], now=NOW + 100 * TOMBSTONE_S)
    assert forever.records


def test_a_ring_that_never_read_the_keys_lets_nobody_in():
    key = create("acme", "user", now=NOW)
    ring = KeyRing()
    ring.merge([key.record], now=NOW)
    with pytest.raises(KeysUnknown):
        ring.authenticate(key.text, now=NOW)


def test_a_ring_that_was_cut_off_goes_on_as_long_as_it_may():
    key = create("acme", "user", now=NOW)
    ring_of(key.record).authenticate(key.text, now=NOW + 1e6)
    bounded = ring_of(key.record, age_max_s=60)
    bounded.authenticate(key.text, now=NOW + 60)
    with pytest.raises(KeysUnknown, match="61 s"):
        bounded.authenticate(key.text, now=NOW + 61)


def test_an_update_changes_the_named_limits_and_no_secret():
    key = create("acme", "user", now=NOW, limits=Limits(requests_per_minute=5, weight=300))
    updated = update(key.record, changed(key.record.limits, {"tokens_per_minute": 70}))
    assert updated.version == 2
    assert updated.limits == Limits(requests_per_minute=5, weight=300, tokens_per_minute=70)
    ring = ring_of(key.record, updated, key.record)
    assert ring.authenticate(key.text, now=NOW).limits == updated.limits
    assert ring.is_limited("acme")
    assert not ring.is_limited("other")
    for last in (update(updated, NO_LIMITS), revoke(updated, now=NOW)):
        assert not ring_of(last).is_limited("acme")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"requests": 1}, "'requests' is not the name of a limit"),
        ({"requests_per_minute": -1}, "a limit has an invalid value"),
        ({"requests_per_minute": "many"}, "a limit has an invalid value"),
        ({"weight": 0}, "a limit has an invalid value"),
        ({"tokens_per_minute": 10**13}, "a limit has an invalid value"),
    ],
)
def test_what_is_no_limit_is_refused(changes, word):
    with pytest.raises(BadRequest, match=word):
        changed(NO_LIMITS, changes)
