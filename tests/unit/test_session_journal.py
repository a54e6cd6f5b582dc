"""The sessions' journal: what was appended is read again, whatever became of the files' ends."""

import asyncio
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_ray.gateway.session_journal import (
    JournalRecord,
    SessionJournal,
    pack_many,
    unpack_many,
    unpack_record,
)

RECORDS = st.lists(
    st.builds(
        JournalRecord,
        st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=3),
        st.binary(max_size=60) | st.just(b"ARS1ARS1\x00\x00\x00\x00"),
    ),
    max_size=8,
)


def written(folder, records, **options):
    journal = SessionJournal(folder, "a", **options)
    for record in records:
        journal.append(record)
    journal.close()
    return sorted(folder.glob("*.seg"))


def read(folder):
    journal = SessionJournal(folder, "a")
    found = [JournalRecord(r.head, bytes(r.body)) for _, _, r in journal.read()]
    journal.close()
    return found, journal


NUMBERED = [JournalRecord({"n": n}, bytes([n]) * 40) for n in range(6)]


@given(RECORDS, st.integers(1, 200))
@settings(max_examples=25, deadline=None)
def test_what_was_appended_is_read_in_its_order(tmp_path_factory, records, segment_bytes):
    folder = tmp_path_factory.mktemp("journal")
    written(folder, records, segment_bytes=segment_bytes)
    found, journal = read(folder)
    assert found == records
    assert journal.damages == []
    assert unpack_many(pack_many(records)) == records


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_file_cut_anywhere_gives_the_records_before_the_cut_and_grows_on(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("journal")
    (path,) = written(folder, NUMBERED)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:cut])
    found, journal = read(folder)
    size = len(whole) // len(NUMBERED)
    assert found == NUMBERED[: cut // size]
    assert journal.damages == []
    assert path.stat().st_size == cut // size * size
    written(folder, NUMBERED[:1])
    assert read(folder)[0] == [*found, NUMBERED[0]]


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_damaged_record_is_told_by_file_and_offset_and_the_others_are_read(
    tmp_path_factory, data
):
    folder = tmp_path_factory.mktemp("journal")
    (path,) = written(folder, NUMBERED)
    raw = bytearray(path.read_bytes())
    size = len(raw) // len(NUMBERED)
    at = data.draw(st.integers(0, len(raw) - size - 1))  # a length that overshoots ends the last
    raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    found, journal = read(folder)
    hit = at // size
    assert found == [record for n, record in enumerate(NUMBERED) if n != hit]
    assert journal.damages == [f"{path}: {size} bytes at offset {hit * size} are damaged"]


def test_a_damaged_record_is_in_the_log(tmp_path, caplog):
    (path,) = written(tmp_path, NUMBERED)
    raw = bytearray(path.read_bytes())
    raw[30] ^= 1
    path.write_bytes(raw)
    with caplog.at_level(logging.ERROR):
        read(tmp_path)
    assert f"{path}: " in caplog.text
    assert "offset 0 are damaged" in caplog.text


def test_replicas_write_side_by_side_and_read_their_own(tmp_path):
    one, other = SessionJournal(tmp_path, "a"), SessionJournal(tmp_path, "ab")
    one.append(NUMBERED[1])
    other.append(NUMBERED[2])
    one.close()
    other.close()
    assert read(tmp_path)[0] == [NUMBERED[1]]


def test_a_restarted_writer_touches_no_file_of_its_predecessor(tmp_path):
    (first,) = written(tmp_path, NUMBERED[:1])
    before = first.read_bytes()
    assert len(written(tmp_path, NUMBERED[1:2])) == 2
    assert first.read_bytes() == before


def test_segments_stay_until_what_was_moved_from_them_is_on_disk(tmp_path):
    async def go():
        journal = SessionJournal(tmp_path, "a", segment_bytes=1)
        for record in NUMBERED[:3]:
            journal.append(record)
        journal.append(NUMBERED[0], is_moved=True)
        journal.delete_before(3)
        assert journal.oldest == 0
        await journal.settled()
        journal.delete_before(3)
        assert journal.oldest == journal.number == 3
        assert journal.num_bytes == sum(p.stat().st_size for p in tmp_path.glob("*.seg"))
        journal.close()

    asyncio.run(go())


def test_all_that_wait_for_the_disk_at_once_return(tmp_path):
    async def go():
        journal = SessionJournal(tmp_path, "a", segment_bytes=50)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            for record in NUMBERED * 5:
                journal.append(record)
                tasks.create_task(journal.settled())
                await asyncio.sleep(0)
        await journal.settled()
        journal.close()

    asyncio.run(go())


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x04\x00\x00\x00nope", b"\xff\xff\xff\xff{}"])
def test_bytes_that_are_no_record_are_refused(payload):
    with pytest.raises(ValueError, match="journal record"):
        unpack_record(payload)
