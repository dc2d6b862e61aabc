"""The arithmetic of the demo draft's study, on answers made by hand."""

from bench.demo.draft_score import Answer, Kept, bars, figures, held_out, interval, repeats, report


def answer(tokens: int, proposed: list[int], accepted: list[int], confidence: float = 0.8) -> Answer:
    said = [(confidence,) * n for n in proposed]
    return Answer(list(range(tokens)), len(proposed), 0, proposed, accepted, said)


def test_only_a_run_of_eight_that_comes_three_times_is_a_repetition():
    phrase = list(range(8))
    assert repeats([*phrase, 90, *phrase, 91, *phrase])
    assert repeats([7] * 10)
    assert not repeats([7] * 9)
    assert not repeats([*phrase, 90, *phrase, 91, *phrase[:7]])
    assert not repeats(range(400))
    assert not repeats([])


def test_tokens_a_cycle_are_pooled_and_slots_are_counted_where_they_were_proposed():
    found = figures([answer(30, [7, 7, 0], [7, 2, 0]), answer(10, [3], [0])])
    assert found["tokens_per_cycle"] == 40 / 4
    assert found["proposing_share"] == 0.75
    assert found["accepted_share"] == round(9 / 17, 4)
    assert found["acceptance_by_slot"] == [0.6667, 0.6667, 0.3333, 0.5, 0.5, 0.5, 0.5]
    assert found["conditional_by_slot"] == [0.6667, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_confidence_is_held_against_slots_that_were_reached():
    """Of seven proposals of which two were kept, the third was judged and the others never were."""
    (row,) = figures([answer(3, [7], [2], confidence=0.6)])["calibration"]["table"]
    assert row["num_tokens"] == 3
    assert abs(row["accepted"] - 2 / 3) < 1e-6
    assert figures([answer(3, [0, 0, 0], [0, 0, 0])])["calibration"] is None


def test_a_ratio_is_of_the_same_answers_and_has_an_interval():
    fast, slow = [answer(40, [7] * 10, [3] * 10)] * 9, [answer(40, [7] * 20, [1] * 20)] * 9
    assert interval(fast, slow) == {"ratio": 2.0, "from": 2.0, "to": 2.0}
    mixed = [answer(40, [7] * n, [1] * n) for n in (5, 10, 40)] * 3
    found = interval(mixed, slow)
    assert found["from"] < found["ratio"] < found["to"]


GENRES = ["sums", "sums", "code"]


def study(cycles: int = 10, code_cycles: int = 10) -> dict:
    plain = [answer(40, [0] * 40, [0] * 40) for _ in GENRES]
    plain[1].tokens = [7] * 40
    own = [answer(40, [7] * cycles, [3] * cycles) for _ in GENRES[:2]]
    own[1].tokens = [7] * 40
    own.append(answer(40, [7] * code_cycles, [3] * code_cycles))
    return report({"dflash2": own, "off": plain}, plain, GENRES)


def test_answers_that_repeat_themselves_are_counted_apart():
    found = study()
    own = found["drafters"]["dflash2"]
    assert found["num_repeating"] == 1
    assert own["all"]["num_answers"] == 2
    assert own["by_genre"]["sums"]["num_answers"] == 1
    assert own["repeating"]["num_answers"] == 1
    assert found["ratios"]["dflash2 over off"]["ratio"] == 4


def test_bars_are_overall_by_genre_and_of_the_text():
    assert all(bars(study()).values())
    assert list(bars(study(cycles=30)).values()) == [False, False, True]
    assert list(bars(study(cycles=6, code_cycles=21)).values()) == [False, False, True]
    assert list(bars(study(cycles=6, code_cycles=19)).values()) == [True, True, True]
    found = study()
    found["drafters"]["off"]["num_different"] = 1
    assert list(bars(found).values()) == [True, True, False]


def test_the_prompts_are_the_sixty_that_nobody_trains_on():
    chosen, prompts = held_out(20)
    assert len(prompts) == 60
    assert sorted({task["genre"] for task in chosen}) == ["code", "stories", "sums"]
    assert [task["genre"] for task in held_out(1)[0]] == ["sums", "code", "stories"]


def test_kept_answers_are_read_back_as_they_were(tmp_path):
    place = tmp_path / "answers.jsonl"
    given = answer(30, [7, 0], [2, 0], confidence=0.5)
    Kept(place).add("dflash2", [1, 2], given)
    kept = Kept(place)
    found = kept.answers[kept.name("dflash2", [1, 2])]
    assert figures([found]) == figures([given])
    assert kept.name("dflash2", [1, 3]) not in kept.answers
    assert kept.name("off", [1, 2]) not in kept.answers
