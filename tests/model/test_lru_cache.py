"""A cache that remembers what was asked for last."""

from __future__ import annotations

from penstock.model.lru_cache import KINDS, LruCache


def test_what_was_asked_for_longest_ago_is_forgotten_first() -> None:
    cache: LruCache[int] = LruCache()
    for number in range(KINDS):
        assert cache.put(number, -number) == -number
    assert cache.get(0) == 0  # asked for again, so that 1 is the oldest now
    cache.put("another", 7)
    assert len(cache) == KINDS
    assert cache.get(1) is None
    assert cache.get(0) == 0


def test_a_key_that_is_put_again_has_its_new_value_and_counts_once() -> None:
    cache: LruCache[str] = LruCache()
    cache.put("kind", "old")
    cache.put("kind", "new")
    assert (len(cache), cache.get("kind")) == (1, "new")
    cache.clear()
    assert cache.get("kind") is None
