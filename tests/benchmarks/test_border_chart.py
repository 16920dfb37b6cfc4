"""That the figure has each forest where its times say, in the colour of what the planner takes."""

from xml.etree import ElementTree

from benchmarks.border_chart import FLAT, SHARED, TOP, draw
from benchmarks.cascade_border import Row

SVG = "{http://www.w3.org/2000/svg}"
ROW = {
    "dtype": "bfloat16",
    "shape": "32,8,128,64",
    "forest": "random/7",
    "num_requests": 8,
    "is_shared": True,
}
ROWS = [
    {**ROW, "cascade_us": 30.0, "flat_us": 20.0, "is_shared": False},
    {**ROW, "cascade_us": 16.0, "flat_us": 20.0},
    {**ROW, "cascade_us": 90.0, "flat_us": 20.0, "dtype": "float8_e4m3fn"},
]


def test_points_lie_higher_and_further_right_the_longer_sharing_takes():
    circles = list(ElementTree.fromstring(draw([Row(**row) for row in ROWS])).iter(f"{SVG}circle"))

    first, second, other = circles
    assert float(first.attrib["cx"]) < float(second.attrib["cx"]) < float(other.attrib["cx"])
    assert float(first.attrib["cy"]) > float(second.attrib["cy"]) > TOP
    assert float(other.attrib["cy"]) == TOP, "beyond the axis: at its end"
    assert [each.attrib["fill"] for each in circles] == [SHARED, FLAT, SHARED]
    title = first.find(f"{SVG}title")
    assert title is not None
    assert title.text == "random/7, 8 requests: 16.0 us, flat 20.0 us"
