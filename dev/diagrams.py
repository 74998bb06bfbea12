"""Draws the diagrams of docs/concepts as SVG files with a light background, legible in light and dark mode.

.venv/bin/python dev/diagrams.py
"""

import dataclasses
import pathlib
import sys
from xml.sax.saxutils import escape

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "concepts"
INK, GREY, BLUE, GREEN, RED, ORANGE = "#20242c", "#7b8494", "#3a6fd8", "#2f9460", "#cf4747", "#c97a16"
PALE_BLUE, PALE_GREEN, PALE_GREY, PALE_ORANGE, WHITE = "#dce7fb", "#d9f0e3", "#e7eaef", "#fbe9d0", "#ffffff"


class Drawing:
    """SVG elements on a rounded panel."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" font-size="14" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="#f6f7f9"/>',
        ]

    def text(self, x: float, y: float, words: str, size: int = 14, anchor: str = "start", fill: str = INK) -> None:
        """Writes one line."""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        words: str = "",
        fill: str = WHITE,
        line: str = GREY,
        size: int = 14,
    ) -> None:
        """Draws a rounded box with centred lines of text."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{line}"/>')
        lines = words.split("\n") if words else []
        for number, line_text in enumerate(lines):
            middle = y + h / 2 + size * 0.36 + (number - (len(lines) - 1) / 2) * size * 1.25
            self.text(x + w / 2, round(middle, 1), line_text, size, "middle")

    def dot(self, x: float, y: float, fill: str, r: float = 6, line: str = "none") -> None:
        """Draws a circle."""
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="{r}" fill="{fill}" stroke="{line}" stroke-width="2"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        """Draws an arrow."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="M{x1},{y1} L{x2},{y2}" stroke="{GREY}" stroke-width="1.6" marker-end="url(#a)"{dash}/>'
        )

    def line(
        self, points: list[tuple[float, float]], stroke: str = GREY, width: float = 1.2, dashed: bool = False
    ) -> None:
        """Draws a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"{dash}/>')

    def svg(self) -> str:
        """Returns the text of the file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def rounds() -> Drawing:
    """Three prompts with rounds of eight draws and groups of four."""
    d = Drawing(860, 300, "Three prompts draw rounds of eight responses until their stopping rules are met")
    rows = [
        ("prompt A", ["+-++-+-+"], "met after round 1"),
        ("prompt B", ["--------", "---+--+-"], "met after round 2"),
        ("prompt C", ["++++++++", "+++++-++", "++++++-+"], "met after round 3"),
    ]
    for number, name in enumerate(("round 1", "round 2", "round 3")):
        d.text(110 + number * 165, 30, name, 13, fill=GREY)
    d.text(640, 30, "group for the update", 13, fill=GREY)
    for row, (name, drawn, note) in enumerate(rows):
        y = 70 + row * 75
        d.text(20, y + 5, name)
        kept = {"+": 2, "-": 2}
        for number, outcomes in enumerate(drawn):
            x = 100 + number * 165
            d.box(x, y - 20, 152, 40)
            for draw, outcome in enumerate(outcomes):
                chosen = kept[outcome] > 0
                kept[outcome] -= 1
                d.dot(x + 13 + draw * 18, y, GREEN if outcome == "+" else RED, 6, INK if chosen else "none")
        d.arrow(100 + len(drawn) * 165 - 10, y, 630, y, dashed=len(drawn) < 3)
        d.box(638, y - 20, 84, 40, fill=PALE_BLUE, line=BLUE)
        for draw, colour in enumerate((GREEN, GREEN, RED, RED)):
            d.dot(651 + draw * 19, y, colour, 6, INK)
        d.text(732, y + 5, note, 12, fill=GREY)
    d.dot(30, 278, GREEN)
    d.text(42, 283, "correct", 13)
    d.dot(110, 278, RED)
    d.text(122, 283, "wrong", 13)
    d.dot(185, 278, WHITE, 6, INK)
    d.text(198, 283, "kept for the update.  No prompt waits for another one.", 13)
    return d


def addresses() -> Drawing:
    """Everything that decides a token, and everything that does not."""
    d = Drawing(860, 250, "The address of a sample decides its randomness")
    for number, words in enumerate(("run seed", "iteration", "prompt id", "draw index", "token position")):
        d.box(20 + number * 125, 30, 112, 40, words, PALE_BLUE, BLUE)
        d.arrow(76 + number * 125, 70, 330, 112)
    d.box(230, 115, 200, 40, "random bits (fold_in)", WHITE)
    d.arrow(430, 135, 500, 135)
    d.box(505, 115, 160, 40, "sampled token", PALE_GREEN, GREEN)
    d.box(680, 30, 160, 40, "weights, prefix", PALE_BLUE, BLUE)
    d.arrow(745, 70, 620, 112)
    d.text(20, 195, "Without influence:", 13, fill=GREY)
    names = ("slot", "batch size", "window length", "number of hosts", "barrier", "finishing order")
    for number, words in enumerate(names):
        d.box(20 + number * 138, 205, 128, 32, words, PALE_GREY, GREY, 13)
    return d


def window() -> Drawing:
    """Host, device and graders over time."""
    d = Drawing(860, 270, "The device decodes window after window while the host reads the results of the one before")
    for y, name in ((60, "device"), (130, "host"), (205, "graders")):
        d.text(20, y + 5, name)
        d.line([(100, y + 26), (840, y + 26)], PALE_GREY, 2)
    for number in range(4):
        x = 150 + number * 170
        d.box(x, 36, 166, 46, f"window {number + 1}\nfree, refill, decode", PALE_BLUE, BLUE, 12)
        d.box(x - 34, 110, 30, 42, f"→{number + 1}", PALE_ORANGE, ORANGE, 13)
        d.arrow(x - 19, 110, x + 4, 84)
        if number < 3:
            d.box(x + 172, 110, 84, 42, f"read {number + 1}", WHITE, GREY, 13)
            d.arrow(x + 164, 83, x + 190, 109)
            d.box(x + 210, 186, 110, 40, f"grade {number + 1}", PALE_GREEN, GREEN, 13)
            d.arrow(x + 232, 152, x + 245, 184)
    d.text(
        20, 256, "→2: the host submits window 2 before it reads window 1, so the device never waits for the host.", 13
    )
    return d


def pages() -> Drawing:
    """Page tables of one prompt and its draws."""
    d = Drawing(
        860, 290, "Draws of one prompt share its full pages; each has a copy of the last one and pages of its own"
    )
    d.text(20, 34, "prompt of 19 tokens, pages of 8 tokens", 13, fill=GREY)
    for number, words in enumerate(("tokens 1-8", "tokens 9-16", "tokens 17-18")):
        d.box(
            20 + number * 125,
            48,
            115,
            44,
            words,
            PALE_BLUE if number < 2 else PALE_ORANGE,
            BLUE if number < 2 else ORANGE,
        )
    for number in range(3):
        y = 130 + number * 50
        d.text(20, y + 24, f"draw {number + 1}")
        for column, (words, fill, line) in enumerate((
            ("shared", PALE_BLUE, BLUE), ("shared", PALE_BLUE, BLUE), ("copy, then own", PALE_ORANGE, ORANGE),
            ("own", PALE_GREEN, GREEN), ("own, reserved", WHITE, GREEN),
        )):  # fmt: skip
            d.box(90 + column * 130, y, 122, 36, words, fill, line, 13)
    d.arrow(78, 92, 140, 127)
    d.arrow(203, 92, 270, 127)
    d.arrow(327, 92, 400, 127, dashed=True)
    d.text(750, 153, "page table", 13, fill=GREY)
    d.text(750, 170, "of one slot", 13, fill=GREY)
    return d


def resume() -> Drawing:
    """A killed run and the unbroken one."""
    d = Drawing(860, 250, "A run that is killed and resumed ends with the same bits as an unbroken one")
    d.text(20, 65, "unbroken")
    d.text(20, 145, "killed")
    d.text(20, 215, "resumed")
    for number in range(1, 9):
        x = 50 + number * 88
        saved = number in (3, 6)
        d.box(x, 40, 76, 40, f"{number}", PALE_GREEN if saved else WHITE, GREEN if saved else GREY)
        if number <= 5:
            d.box(x, 120, 76, 40, f"{number}", PALE_GREEN if saved else WHITE, GREEN if saved else GREY)
        if number >= 4:
            d.box(x, 190, 76, 40, f"{number}", PALE_GREEN if saved else WHITE, GREEN if saved else GREY)
    d.text(585, 146, "kill -9 in iteration 6", 13, fill=RED)
    d.arrow(352, 162, 398, 188)
    d.text(640, 24, "green: checkpoint", 13, fill=GREEN)
    d.text(105, 215, "checkpoint 3, metrics cut back", 13, fill=GREY)
    return d


def weights() -> Drawing:
    """One set of weights, read by engine and learner, and the gap between their log-probabilities."""
    d = Drawing(860, 210, "Engine and learner read the same weights; the gap compares their log-probabilities")
    d.box(20, 80, 150, 50, "learner's weights", PALE_BLUE, BLUE)
    d.box(280, 30, 170, 50, "engine\ncached decoding", WHITE, GREY, 13)
    d.box(280, 130, 170, 50, "learner\nfull forward pass", WHITE, GREY, 13)
    d.arrow(170, 95, 276, 58)
    d.arrow(170, 115, 276, 152)
    d.text(20, 66, "same arrays, or one cast", 12, fill=GREY)
    d.box(540, 30, 130, 50, "log-probability\nof each token", PALE_ORANGE, ORANGE, 13)
    d.box(540, 130, 130, 50, "log-probability\nof each token", PALE_ORANGE, ORANGE, 13)
    d.arrow(450, 55, 536, 55)
    d.arrow(450, 155, 536, 155)
    d.box(730, 80, 110, 50, "update/\nlogprob_gap", PALE_GREEN, GREEN, 13)
    d.arrow(670, 58, 728, 92)
    d.arrow(670, 152, 728, 118)
    return d


CURVES = (
    ("published: correction none", RED, "none"),
    ("correction stratified", ORANGE, "stratified"),
    ("correction exact", BLUE, "exact"),
)


def objectives() -> Drawing:
    """signal(p) of `balance` with each correction, relative to p = 1/2, for the objectives p and log p."""
    import numpy as np  # noqa: PLC0415

    from reinforce_ada_jax.analysis.enumeration import expectations  # noqa: PLC0415
    from reinforce_ada_jax.config import Config  # noqa: PLC0415

    d = Drawing(860, 390, "The weight of a prompt's gradient by its pass rate, for three corrections")
    rates = np.linspace(0.02, 0.98, 49)
    low, high = np.log10(0.4), np.log10(80.0)
    for panel, (objective, exact_weight) in enumerate((("identity", np.ones_like(rates)), ("log", 1.0 / rates))):
        left, top, width, height = 65 + panel * 420, 50, 350, 250

        def place(p, value):
            return left + width * p, top + height * (high - np.log10(value)) / (high - low)  # noqa: B023

        title = "objective = identity: f(p) = p" if objective == "identity" else "objective = log: f(p) = log p"
        d.text(left + width / 2, 30, title, 14, "middle")
        d.parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="{WHITE}" stroke="{GREY}"/>')
        for value in (0.5, 1, 2, 5, 10, 20, 50):
            _, y = place(0, value)
            d.line([(left, y), (left + width, y)], PALE_GREY)
            d.text(left - 6, round(y + 4, 1), f"{value:g}", 11, "end", GREY)
        for p in (0.0, 0.25, 0.5, 0.75, 1.0):
            d.text(left + width * p, top + height + 16, f"{p:g}", 11, "middle", GREY)
        d.text(left + width / 2, top + height + 33, "pass rate p", 12, "middle", GREY)
        middle = len(rates) // 2
        for _, colour, correction in CURVES:
            config = dataclasses.replace(
                Config().collection, strategy="balance", objective=objective, correction=correction
            )
            signal = expectations(config, rates).signal
            d.line([place(*point) for point in zip(rates, signal / signal[middle], strict=True)], colour, 2.5)
        wanted = exact_weight / exact_weight[middle]
        d.line([place(*point) for point in zip(rates, wanted, strict=True)], INK, 1.5, dashed=True)
    for number, (name, colour, _) in enumerate(CURVES):
        d.line([(70 + number * 215, 361), (96 + number * 215, 361)], colour, 3)
        d.text(102 + number * 215, 366, name, 12)
    d.line([(715, 361), (741, 361)], INK, 1.5, dashed=True)
    d.text(747, 366, "f'(p), relative", 12)
    return d


def main() -> None:
    """Draws all diagrams, or compares them with the files."""
    sys.path.insert(0, str(FOLDER.parents[1]))
    made = {draw.__name__: draw().svg() for draw in (rounds, addresses, window, pages, resume, weights, objectives)}
    files = {name: FOLDER / f"{name}.svg" for name in made}
    if "--check" in sys.argv[1:]:
        different = [name for name, file in files.items() if not file.exists() or file.read_text() != made[name]]
        if different:
            sys.exit(f"error: {', '.join(different)} in docs/concepts differ: run python dev/diagrams.py.")
        return
    for name, file in files.items():
        file.write_text(made[name])


if __name__ == "__main__":
    main()
