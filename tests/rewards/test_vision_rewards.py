"""Rewards for questions about pictures: cases by hand, and properties of distances and overlaps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import scored

from fluxjax.rewards.vision import (
    BoxOverlap,
    Choice,
    EditDistance,
    NumericAnswer,
    OrderedList,
    boxes_in,
    chosen,
    iou,
    options_of,
)

QUESTION = "What is on the mat?\nA. a cat\nB. a dog\nC. a black cat\nD. both (A) and (B)"


@pytest.mark.parametrize(
    ("question", "options"),
    [
        (QUESTION, {"A": "a cat", "B": "a dog", "C": "a black cat", "D": "both (a) and (b)"}),
        ("Which? (A) red (B) green\n(C) blue", {"A": "red", "B": "green", "C": "blue"}),
        ("Which?\n(A) red\n(B) green", {"A": "red", "B": "green"}),
        ("Point A. is where?\nA) 1.5\nB) 2.5", {"A": "1.5", "B": "2.5"}),
        ("A. one\nC. three", {}),
        ("What is it?", {}),
    ],
)
def test_options_of_a_question(question, options):
    assert options_of(question) == options


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("b", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        ("B. a dog", "B"),
        ("a dog", "B"),
        ("A dog.", "B"),
        ("a cat", "A"),
        ("It is a black cat", "C"),
        ("It is B", "B"),
        ("A is right", "A"),
        ("D", "D"),
        ("both (A) and (B)", "D"),
        ("B. a cat", "AB"),
        ("A or B", "AB"),
        ("(A) (B)", "AB"),
        ("a dog and a cat", "AB"),
        ("A thing", ""),
        ("E", ""),
        ("BANANA", ""),
        ("I don't know", ""),
        ("", ""),
    ],
)
def test_letters_that_a_text_chooses(text, letters):
    assert chosen(text, options_of(QUESTION)) == set(letters)


@pytest.mark.parametrize(
    ("reward", "answer", "text", "value", "correct"),
    [
        (Choice(), "B", "Let me see: A is a cat.\nAnswer: B", 1.0, True),
        (Choice(), "(B)", r"\boxed{B}", 1.0, True),
        (Choice(), "a dog", "<answer>(B)</answer>", 1.0, True),
        (Choice(), "B", "The answer is a dog.", 1.0, True),
        (Choice(), "B", "There is a cat, but no mat.\nB", 1.0, True),
        (Choice(), "B", "Answer: A", 0.0, False),
        (Choice(), "B", "Answer: A or B", 0.0, False),
        (Choice(), "B", "", 0.0, False),
        (NumericAnswer(), "100", "about 104", 1.0, True),
        (NumericAnswer(), "100", "about 106", 0.0, False),
        (NumericAnswer(), "100", r"100 or \boxed{95}", 1.0, True),
        (NumericAnswer(tolerance=0.0), "0.1", "0.10", 1.0, True),
        (NumericAnswer(tolerance=0.0), "1,000", "1000", 1.0, True),
        (NumericAnswer(tolerance=0.0, absolute=2.0), "10", "12", 1.0, True),
        (NumericAnswer(tolerance=0.0, absolute=2.0), "10", "12.1", 0.0, False),
        (NumericAnswer(), "0", "0.001", 0.0, False),
        (NumericAnswer(), "-3", "3", 0.0, False),
        (NumericAnswer(), "12%", "0.12", 1.0, True),
        (NumericAnswer(), "12", "12%", 0.0, False),
        (NumericAnswer(), "12", "NaN", 0.0, False),
        (NumericAnswer(), "12", "inf", 0.0, False),
        (NumericAnswer(), "12", "twelve", 0.0, False),
        (NumericAnswer(tolerance=1e300), "12", "1e999", 0.0, False),
        (EditDistance(), "kitten", "kitten", 1.0, True),
        (EditDistance(), "kitten", " Kitten\n", 1.0, True),
        (EditDistance(), "kitten", "<answer>kitten</answer>", 1.0, True),
        (EditDistance(), "kitten", "sitting", 1 - 3 / 7, False),
        (EditDistance(), "kitten", "sit", 0.0, False),  # 4 edits of 6 letters: below the threshold
        (EditDistance(), "kitten", "", 0.0, False),
        (EditDistance(), "kitten", "kitten" * 2000, 0.0, False),
        (EditDistance(threshold=0.0), "kitten", "sit", 1 - 4 / 6, False),
        (EditDistance(ignore_case=False), "Ab", "ab", 0.5, False),
        (EditDistance(), "\u00e9", "e\u0301", 1.0, True),  # one letter, written in two ways
        (OrderedList(), "1, 2, 3", "1, 2, 3", 1.0, True),
        (OrderedList(), "[1, 2, 3]", "1 -> 2 → 3", 1.0, True),
        (OrderedList(), '["Cat", "Dog"]', "The order is\ncat, dog.", 1.0, True),
        (OrderedList(), "1, 2, 3", "The answer is [1, 2, 3].", 1.0, True),
        (OrderedList(), "a > b", "<answer>\na\nb\n</answer>", 1.0, True),
        (OrderedList(), "1, 2, 3", "3, 2, 1", 1 / 3, False),
        (OrderedList(), "1, 2, 3", "1, 2", 2 / 3, False),
        (OrderedList(), "1, 2, 3", "1, 2, 3, 3", 3 / 4, False),
        (OrderedList(), "1, 2, 3", "", 0.0, False),
        (OrderedList(), '["a, b", "c"]', '["a, b", "c"]', 1.0, True),
        (BoxOverlap(), "[0,0,10,10]", "[0,0,10,10]", 1.0, True),
        (BoxOverlap(), "[0,0,10,10]", "[0,0,10,5]", 0.5, True),
        (BoxOverlap(), "[0,0,10,10]", "[0,0,10,4]", 0.4, False),
        (BoxOverlap(), "[0,0,10,10]", "[5,5,15,15]", 25 / 175, False),
        (BoxOverlap(), "[0,0,10,10]", "[10,10,0,0]", 0.0, False),
        (BoxOverlap(), "[0,0,10,10]", "[20,20,30,30]", 0.0, False),
        (BoxOverlap(), "[0,0,10,10]", "nowhere", 0.0, False),
        (BoxOverlap(), "[0,0,10,10]", "[0,0,10,10] [0,0,10,10]", 0.5, False),
        (BoxOverlap(), "[[0,0,10,10],[20,20,30,30]]", "[[20,20,30,30],[0,0,10,5]]", 0.75, True),
        (BoxOverlap(), "[[0,0,10,10],[20,20,30,30]]", "[0,0,10,10]", 0.5, False),
        (BoxOverlap(threshold=0.5), "[0,0,10,10]", "[0,0,10,6]", 1.0, True),
        (BoxOverlap(threshold=0.7), "[0,0,10,10]", "[0,0,10,6]", 0.0, True),
        (BoxOverlap(correct_from=0.7), "[0,0,10,10]", "[0,0,10,6]", 0.6, False),
        (BoxOverlap(most_boxes=1), "[0,0,10,10]", "[0,0,10,10] [0,0,10,10]", 0.0, False),
        (BoxOverlap(), "[0,0,10,10]", "[NaN, 0, inf, 10]", 0.0, False),
        (BoxOverlap(), "[0,0,10,10]", '<answer>{"bbox_2d": [0, 0, 10, 10]}</answer> [0,0,1,1]', 1.0, True),
    ],
)
def test_rewards_by_hand(reward, answer, text, value, correct):
    found = scored(reward, answer, text, QUESTION)
    assert found.value == pytest.approx(value, abs=1e-12) and found.correct is correct
    if isinstance(reward, OrderedList):
        assert scored(OrderedList(graded=False), answer, text).value == float(correct)


def test_a_choice_of_two_says_which():
    assert scored(Choice(), "B", "Answer: A or B", QUESTION).reason == "ambiguous: A and B"


@pytest.mark.parametrize(
    ("reward", "answer", "complaint"),
    [
        (Choice(), "a bird", "answer 'a bird' of prompt p1 is neither a letter nor the text of an option"),
        (NumericAnswer(), "many", "'many' of prompt p1 has no number"),
        (BoxOverlap(), "here", "'here' of prompt p1 has no box"),
    ],
)
def test_an_answer_that_cannot_be_graded_is_an_error_of_the_data(reward, answer, complaint):
    with pytest.raises(ValueError, match=complaint):
        scored(reward, answer, "12 B", QUESTION)


WORDS = st.text("abc ", max_size=12)


@given(WORDS, WORDS, WORDS)
def test_edit_distance_is_a_metric(first, second, third):
    def distance(one, two):  # from the similarity, back to the number of edits
        longest = max(len(" ".join(text.split())) for text in (one, two))
        return (1 - scored(EditDistance(threshold=0.0), one, two).value) * longest

    assert distance(first, second) == pytest.approx(distance(second, first), abs=1e-9)
    assert distance(first, third) <= distance(first, second) + distance(second, third) + 1e-9
    assert (distance(first, second) < 1e-9) == (first.split() == second.split())


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3.5, 4]",
        '```json\n[{"bbox_2d": [1, 2, 3.5, 4], "label": "cat"}]\n```',
        "<|box_start|>(1,2),(3.5,4)<|box_end|>",
        "(1, 2, 3.5, 4)",
        "It is at [1,2,3.5,4], not at [1,2,3]",
    ],
)
def test_boxes_in_texts(text):
    assert boxes_in(text).tolist() == [[1, 2, 3.5, 4]]


CORNERS = st.tuples(*[st.integers(0, 50)] * 2, *[st.integers(1, 50)] * 2)
BOXES = CORNERS.map(lambda c: [c[0], c[1], c[0] + c[2], c[1] + c[3]])


@given(st.lists(BOXES, min_size=1, max_size=5), st.lists(BOXES, min_size=1, max_size=5))
def test_overlap_is_symmetric_bounded_and_one_for_the_same_boxes(first, second):
    reward = BoxOverlap()
    forth, back = scored(reward, str(first), str(second)).value, scored(reward, str(second), str(first)).value
    assert forth == pytest.approx(back, abs=1e-12) and 0 <= forth <= 1
    assert scored(reward, str(first), str(first[::-1])).value == pytest.approx(1.0, abs=1e-12)


@given(BOXES, BOXES, st.floats(0.5, 20), st.integers(-100, 100))
def test_overlap_does_not_depend_on_unit_and_origin(first, second, unit, origin):
    one, two = np.array([first], np.float64), np.array([second], np.float64)
    assert iou(one * unit + origin, two * unit + origin) == pytest.approx(iou(one, two), abs=1e-9)
