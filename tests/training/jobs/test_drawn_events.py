"""Events are read as they were written, wherever a kill cut a line and a reader stopped: drawn by hypothesis."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import drawn, json_values, names
from training.jobs.protocol import Events, Job, read_events

fields = st.dictionaries(names.filter(lambda name: name not in ("kind", "time")), json_values, max_size=3)


@drawn
@given(tries=st.lists(st.lists(fields, min_size=1, max_size=4), min_size=1, max_size=3), data=st.data())
def test_drawn_events_are_read_once_and_only_a_cut_line_is_missing(
    tries: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        file, expected, offset = Path(folder) / "events.jsonl", [], 0
        read: list[dict[str, Any]] = []
        for events in tries:
            writer = Events(file)
            for event in events:
                before = file.stat().st_size
                writer.write("drawn", **{"fields": event})
                found, offset = read_events(file, offset)
                read += found
            expected += events
            if data.draw(st.booleans(), "killed in its last line"):
                length = file.stat().st_size - before
                # Of a length that varies with the time in it. Without its last byte alone, a line is whole.
                cut = 1 + data.draw(st.integers(0, 1000), "thousandths that are left") * (length - 3) // 1000
                offset = min(offset, before)
                with file.open("rb+") as opened:
                    opened.truncate(before + cut)
                expected.pop()
                read.pop()
        Events(file)
        found, _ = read_events(file, offset)
        assert [event["fields"] for event in read + found] == expected
        assert [event["fields"] for event in read_events(file, 0, ["drawn"])[0]] == expected
        assert read_events(file, 0, ["other"])[0] == []


@drawn
@given(settings=st.dictionaries(names, json_values, max_size=4))
def test_a_drawn_job_is_read_as_it_was_written(settings: dict[str, Any]) -> None:
    job = Job(program="training.programs.fit", key="a" * 40, settings=settings, inputs={"rows": "/rows"})
    with TemporaryDirectory() as folder:
        job.write(Path(folder))
        assert Job.read(Path(folder)) == job
