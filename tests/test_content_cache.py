"""Caches addressed by content: where they are, what damage and concurrent use do to them, and how large they grow."""

from __future__ import annotations

import os

import pytest

from adaptc.content_cache import OFF, ContentCache, cache_key


def test_keys_tell_where_parts_end():
    assert cache_key("ab", "c") != cache_key("a", "bc")
    assert cache_key("ü", b"x") == cache_key("ü".encode(), memoryview(b"x"))


def test_what_is_stored_is_found(tmp_path):
    cache, key = ContentCache(tmp_path), cache_key("x")
    assert cache.get(key) is None
    cache.put(key, b"content")
    cache.put(cache_key("empty"), b"")
    assert cache.get(key) == b"content" and cache.get(cache_key("empty")) == b""
    assert not [path for path in tmp_path.rglob(".new-*")]


@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: raw[:-1], lambda raw: raw + b"x",
                                    lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), lambda raw: bytes([raw[0] ^ 1]) + raw[1:]])
def test_a_damaged_entry_is_none(tmp_path, damage):
    cache, key = ContentCache(tmp_path), cache_key("x")
    cache.put(key, b"content")
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.write_bytes(damage(file.read_bytes()))
    assert cache.get(key) is None
    cache.put(key, b"content")
    assert cache.get(key) == b"content"


def test_an_entry_under_another_name_is_none(tmp_path):
    cache = ContentCache(tmp_path)
    cache.put(cache_key("x"), b"content")
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    other = cache_key("y")
    (tmp_path / other[:2]).mkdir(exist_ok=True)
    os.rename(file, tmp_path / other[:2] / other)
    assert cache.get(other) is None


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    cache = ContentCache(tmp_path / "file" / "below")
    cache.put(cache_key("x"), b"content")
    cache.trim()
    assert cache.get(cache_key("x")) is None


def test_where_caches_are(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ADAPTC_CACHE", raising=False)
    assert ContentCache.named("kernels").folder == tmp_path / "adaptc" / "kernels"
    monkeypatch.setenv("ADAPTC_CACHE", str(tmp_path / "mine"))
    assert ContentCache.named("kernels").folder == tmp_path / "mine" / "kernels"


def test_caches_switched_off(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADAPTC_CACHE", OFF)
    cache = ContentCache.named("kernels")
    cache.put(cache_key("x"), b"content")
    cache.trim()
    assert cache.get(cache_key("x")) is None and not [*tmp_path.iterdir()]


def test_what_was_used_longest_ago_goes_first(tmp_path):
    cache = ContentCache(tmp_path, limit=1000)
    keys = [cache_key(str(i)) for i in range(5)]
    for age, key in enumerate(keys):
        cache.put(key, bytes(250))
        os.utime(tmp_path / key[:2] / key, (age, age))
    assert cache.get(keys[0]) is not None  # used now
    cache.trim()
    assert [cache.get(key) is not None for key in keys] == [True, False, False, True, True]
    cache.trim()
    assert [cache.get(key) is not None for key in keys] == [True, False, False, True, True]
