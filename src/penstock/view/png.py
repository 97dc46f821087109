"""The picture as PNG, without a drawing library: rectangles, a small bitmap font, and zlib.

A Gantt chart is rectangles and short labels, so a rasteriser for it is this one page. The font is
the plain 5 x 7 matrix of small displays, drawn at twice its size on a canvas of twice the
picture's, so that text is crisp on any screen. For type of a better quality take the SVG.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from penstock.view.picture import Picture, Rectangle, Words, picture
from penstock.view.run import Run

__all__ = ["png", "render", "save_png"]

SCALE = 2
THEME = {"ground": "#ffffff", "text": "#15181d", "soft": "#596273", "idle": "#eceff3"}
# columns of the printable ASCII letters from space to tilde, five to a letter, the lowest bit on top
FONT = bytes.fromhex(
    "0000000000"
    "00005f0000"
    "0007000700"
    "147f147f14"
    "242a7f2a12"
    "2313086462"
    "3649552250"
    "0005030000"
    "001c224100"
    "0041221c00"
    "14083e0814"
    "08083e0808"
    "0050300000"
    "0808080808"
    "0060600000"
    "2010080402"
    "3e5149453e"
    "00427f4000"
    "4261514946"
    "2141454b31"
    "1814127f10"
    "2745454539"
    "3c4a494930"
    "0171090503"
    "3649494936"
    "064949291e"
    "0036360000"
    "0056360000"
    "0814224100"
    "1414141414"
    "0041221408"
    "0201510906"
    "324979413e"
    "7e1111117e"
    "7f49494936"
    "3e41414122"
    "7f4141221c"
    "7f49494941"
    "7f09090901"
    "3e4149497a"
    "7f0808087f"
    "00417f4100"
    "2040413f01"
    "7f08142241"
    "7f40404040"
    "7f020c027f"
    "7f0408107f"
    "3e4141413e"
    "7f09090906"
    "3e4151215e"
    "7f09192946"
    "4649494931"
    "01017f0101"
    "3f4040403f"
    "1f2040201f"
    "3f4038403f"
    "6314081463"
    "0708700807"
    "6151494543"
    "007f414100"
    "0204081020"
    "0041417f00"
    "0402010204"
    "4040404040"
    "0001020400"
    "2054545478"
    "7f48444438"
    "3844444420"
    "384444487f"
    "3854545418"
    "087e090102"
    "0c5252523e"
    "7f08040478"
    "00447d4000"
    "2040443d00"
    "7f10284400"
    "00417f4000"
    "7c04180478"
    "7c08040478"
    "3844444438"
    "7c14141408"
    "081414187c"
    "7c08040408"
    "4854545420"
    "043f444020"
    "3c4040207c"
    "1c2040201c"
    "3c4030403c"
    "4428102844"
    "0c5050503c"
    "4464544c44"
    "0008364100"
    "00007f0000"
    "0041360800"
    "0804081008"
)
ADVANCE = 6 * SCALE  # pixels from letter to letter


def save_png(runs: Sequence[Run], path: str | PathLike[str]) -> None:
    """Write the picture of these runs."""
    Path(path).write_bytes(png(runs))


def png(runs: Sequence[Run]) -> bytes:
    """The picture of these runs."""
    return render(picture(runs))


def render(drawn: Picture) -> bytes:
    """Any picture as PNG, at twice its size."""
    canvas = _Canvas(round(drawn.width * SCALE), round(drawn.height * SCALE))
    for shape in drawn.shapes:
        if isinstance(shape, Rectangle):
            canvas.box(shape)
        else:
            canvas.words(shape)
    return canvas.file()


def _colour(name: str) -> bytes:
    return bytes.fromhex(THEME.get(name, name)[1:])


class _Canvas:
    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows = [bytearray(_colour("ground") * width) for _ in range(height)]

    def fill(self, left: int, top: int, right: int, bottom: int, colour: bytes) -> None:
        left, right = max(0, left), min(self.width, right)
        if right > left:
            stripe = colour * (right - left)
            for row in self.rows[max(0, top) : max(0, bottom)]:
                row[3 * left : 3 * right] = stripe

    def box(self, box: Rectangle) -> None:
        left, top = round(box.x * SCALE), round(box.y * SCALE)
        right = max(left + 1, round((box.x + box.width) * SCALE))
        self.fill(left, top, right, round((box.y + box.height) * SCALE), _colour(box.colour))

    def words(self, words: Words) -> None:
        size = len(words.text) * ADVANCE - SCALE
        back = {"start": 0, "middle": size // 2, "end": size}[words.anchor]
        x, top = round(words.x * SCALE) - back, round(words.y * SCALE) - 7 * SCALE // 2
        colour = _colour(words.colour)
        for letter in words.text:
            self.letter(letter, x, top, colour, words.bold)
            x += ADVANCE

    def letter(self, letter: str, x: int, top: int, colour: bytes, bold: bool) -> None:
        code = ord(letter) - 32 if " " <= letter <= "~" else ord("?") - 32
        for column, bits in enumerate(FONT[5 * code : 5 * code + 5]):
            left = x + column * SCALE
            for line in range(7):
                if bits >> line & 1:
                    y = top + line * SCALE
                    self.fill(left, y, left + SCALE + bold, y + SCALE, colour)

    def file(self) -> bytes:
        """Three bytes a pixel, rows unfiltered: zlib makes little of flat colour anyway."""
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        dots = struct.pack(">IIB", 5669, 5669, 1)  # dots a metre: 144 to an inch
        data = zlib.compress(b"".join(b"\0" + row for row in self.rows), 9)
        chunks = ((b"IHDR", head), (b"pHYs", dots), (b"IDAT", data), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
