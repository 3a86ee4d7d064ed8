from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe.report.labels import free_place, overlap, within
from fedmoe.report.svg import Frame

FRAME = Frame(68, 12, 624, 372)
places = st.tuples(st.floats(68, 624), st.floats(12, 372), st.floats(20, 170))


@settings(deadline=None, max_examples=50)
@given(st.lists(places, min_size=1, max_size=10))
def test_labels_cover_neither_points_nor_one_another(points):
    marks = [Frame(x - 7, y - 7, x + 7, y + 7) for x, y, _ in points]
    boxes: list[Frame] = []
    for x, y, width in points:
        boxes.append(free_place(x, y, width, marks + boxes, FRAME))
    assert not any(overlap(a, b) for a, b in combinations(boxes, 2))
    assert not any(overlap(box, mark) for box in boxes for mark in marks)
    assert all(within(box, FRAME) for box in boxes)


def test_labels_of_equal_points_do_not_collide():
    boxes: list[Frame] = []
    for _ in range(20):
        boxes.append(free_place(600, 20, 150, [Frame(593, 13, 607, 27), *boxes], FRAME))
    assert not any(overlap(a, b) for a, b in combinations(boxes, 2))
