"""One page of every group to scale, as an SVG document.

From top to bottom, each bar is a part of the one above, enlarged: the page of a block
id; its kernel pages, or states and padding; one kernel page; one token's keys and
values. Pages of all groups have one scale.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from xml.etree import ElementTree as ET

from vllm_patches.explain.explained import Explained, Group, Part

_WIDTH, _MARGIN = 1200.0, 24.0
_BAR = _WIDTH - 2 * _MARGIN
_HEIGHT, _GAP = 30.0, 36.0
"""Of a bar, and between two."""
_LETTER = 6.6
"""Width of a letter, about."""
_COLOURS = {
    "conv": "#7bc47f",
    "ssm": "#f0a85e",
    "K": "#5fb3b3",
    "V": "#a58bd0",
    "latent": "#5fb3b3",
    "scales": "#d9c25f",
    "padding": "#d4d4d4",
}
_PLAIN = ("#8fb8de", "#b7d3ec")
"""Of parts that are numbered, in turn."""
_STYLE = "text{font:12px sans-serif;fill:#222}.head{font-weight:bold;font-size:15px}"
_DENSE = 4.0
"""Points below which a part gets no box of its own."""


def picture(explained: Explained) -> str:
    """The SVG document."""
    canvas = _Canvas()
    canvas.text(0, f"{explained.model}, vLLM {explained.vllm}", is_head=True)
    largest = max(group.page_size_bytes for group in explained.groups)
    for ids, group in _merged(explained.groups):
        _draw(canvas, ids, group, _BAR / largest)
    return canvas.document()


def _merged(groups: Sequence[Group]) -> Iterator[tuple[list[int], Group]]:
    """Groups whose pages look the same, once, and their ids."""

    def looks(group: Group) -> Group:
        return replace(group, id=0, layers=[])

    for _, alike in groupby(groups, key=looks):
        members = list(alike)
        yield [group.id for group in members], members[0]


def _draw(canvas: "_Canvas", ids: list[int], group: Group, scale: float) -> None:
    many = f"groups {ids[0]} to {ids[-1]}" if len(ids) > 1 else f"group {ids[0]}"
    page = f"{group.page_size_bytes:,} bytes"
    tokens = f"{group.block_size:,} tokens"
    canvas.y += _GAP
    canvas.text(0, f"{many}: {group.kind}", is_head=True)
    if group.kernel_page:
        of = f"kernel pages of {group.kernel_block_size:,} tokens"
        divides = f"{tokens} = {group.k:,} {of}" if group.k > 1 else f"{tokens}"
        canvas.text(0, f"one block id = one page = {divides}, {page}")
    else:
        states = " + ".join(f"{part.name} {part.size:,}" for part in group.parts)
        text = f"one block id = one page = the states after {tokens} = {states}, {page}"
        canvas.text(0, text)
    canvas.bar(0, group.page_size_bytes * scale, "#fff", f"page: {tokens}, {page}")
    canvas.y += 4
    canvas.row(0, group.parts, scale)
    if not group.kernel_page:
        return
    first = group.parts[0]
    text = f"kernel page 0: {group.kernel_block_size:,} tokens, {first.size:,} bytes"
    if group.k > 1:
        canvas.zoom(first.size * scale, text)
        scale = _BAR / first.size
    else:
        canvas.y += 4
    canvas.row(0, group.kernel_page, scale)
    if group.entry:
        size = sum(part.size for part in group.entry)
        name = group.kernel_page[0].name
        what = name if name == "token 0" else f"the first token of {name}"
        canvas.zoom(size * scale, f"{what}: {size:,} bytes")
        canvas.row(0, group.entry, _BAR / size)


class _Canvas:
    """An SVG document that grows downwards; x in points from the margin."""

    def __init__(self) -> None:
        self.y = _MARGIN
        self._root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg")
        ET.SubElement(self._root, "style").text = _STYLE
        self._background = self._add("rect", x=0, y=0, width=_WIDTH, fill="#fff")

    def _add(self, tag: str, **attributes: object) -> ET.Element:
        return ET.SubElement(
            self._root,
            tag,
            {name.replace("_", "-"): _number(v) for name, v in attributes.items()},
        )

    def text(self, x: float, text: str, is_head: bool = False) -> None:
        """A line of text."""
        self.y += 18
        element = self._add("text", x=_MARGIN + x, y=self.y - 4)
        if is_head:
            element.set("class", "head")
        element.text = text

    def _label(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        self._add("text", x=_MARGIN + x, y=y, text_anchor=anchor).text = text

    def bar(self, x: float, width: float, colour: str, text: str) -> None:
        """A box with its text in it, where it fits."""
        box = self._add(
            "rect",
            x=_MARGIN + x,
            y=self.y,
            width=width,
            height=_HEIGHT,
            fill=colour,
            stroke="#555",
        )
        ET.SubElement(box, "title").text = text
        if len(text) * _LETTER < width:
            self._label(x + width / 2, self.y + _HEIGHT / 2 + 4, text)
        self.y += _HEIGHT

    def row(self, x: float, parts: Sequence[Part], scale: float) -> None:
        """Boxes side by side, and the byte offsets below them, where they fit."""
        top, free = self.y, -1.0
        smallest = min(part.size for part in parts) * scale
        if len(parts) > 2 and smallest < _DENSE:
            self._dense(x, parts, scale)
        else:
            for i, part in enumerate(parts):
                self.y = top
                colour = _COLOURS.get(part.name, _PLAIN[i % len(_PLAIN)])
                width = part.size * scale
                texts = (f"{part.name}: {part.size:,} bytes", part.name)
                text = next(
                    (t for t in texts if len(t) * _LETTER < width),
                    part.name.split()[-1],
                )
                self.bar(x + part.offset * scale, width, colour, text)
        end = parts[-1].offset + parts[-1].size
        last = x + end * scale
        for offset in [part.offset for part in parts] + [end]:
            at, width = x + offset * scale, len(f"{offset:,}") * _LETTER
            is_last = offset == end
            left = at - width if is_last else at
            fits = left > free and (is_last or at + width < last - width - 8)
            if fits:
                self._label(left, top + _HEIGHT + 13, f"{offset:,}", "start")
                self._add(
                    "path",
                    d=f"M{_number(_MARGIN + at)} {_number(top + _HEIGHT)}v4",
                    stroke="#555",
                )
                free = left + width + 6
        self.y = top + _HEIGHT + 18

    def _dense(self, x: float, parts: Sequence[Part], scale: float) -> None:
        """Parts too many for boxes: the first and the last by name."""
        size = sum(part.size for part in parts)
        text = f"{parts[0].name} to {parts[-1].name}, {parts[0].size:,} bytes each"
        top = self.y
        self.bar(x, size * scale, _PLAIN[0], text)
        lines = "".join(
            f"M{_number(_MARGIN + x + part.offset * scale)} {_number(top)}v6"
            for part in parts
        )
        self._add("path", d=lines, stroke="#555", stroke_width=0.5)

    def zoom(self, width: float, text: str) -> None:
        """Lines from the first points of the bar above to the whole of the next."""
        above = self.y - 2
        self.y += _GAP
        for x, to in ((0.0, 0.0), (width, _BAR)):
            line = f"M{_number(_MARGIN + x)} {_number(above)}L{_number(_MARGIN + to)} "
            self._add(
                "path",
                d=line + _number(self.y),
                stroke="#999",
                stroke_dasharray="3 3",
            )
        self._label(_BAR / 2, self.y - 6, text)

    def document(self) -> str:
        height = _number(self.y + _MARGIN)
        self._root.set("viewBox", f"0 0 {_number(_WIDTH)} {height}")
        self._background.set("height", height)
        return ET.tostring(self._root, encoding="unicode") + "\n"


def _number(value: object) -> str:
    return (
        f"{value:.2f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else str(value)
    )
