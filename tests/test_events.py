"""Progress of a stage and the time that its rest takes."""

from typing import Any

from vllm_latq.events import seconds_left, stage_progress


def test_time_left_is_the_mean_of_finished_parts_times_the_parts_left() -> None:
    assert seconds_left(0.5, done=0, left=4) is None
    assert seconds_left(30.0, done=2, left=3) == 45.0
    assert seconds_left(30.0, done=2, left=0) == 0.0


def test_stage_emits_its_parts() -> None:
    events: list[Any] = []
    advance = stage_progress(events.append, "reading")
    for done in range(3):
        advance(done, 2)
    assert [(event["event"], event["stage"], event["done"], event["parts"]) for event in events] == [
        ("stage", "reading", done, 2) for done in range(3)
    ]
    assert events[0]["seconds_left"] is None
    assert events[1]["seconds_left"] > 0
    assert events[2]["seconds_left"] == 0.0
