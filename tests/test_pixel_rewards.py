# SPDX-License-Identifier: Apache-2.0
"""Rewards that look at pixels: copies of panels, lines of the grid, words in the image. On drawings made here."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from paco_trl.data import join_grid, split_grid
from paco_trl.rewards import DuplicateReward, LayoutReward, OcrReward, panel_similarity_reward, redness_reward
from paco_trl.rewards.image_rewards import edge_profile, layout_score, panel_similarity, readability


BACKDROPS = ["plain", "night", "sky", "room", "texture"]
GRIDS = [(1, 2), (2, 1), (2, 2), (2, 3), (3, 3), (1, 4)]
SIZES = [(256, 256), (510, 768)]  # width x height


def backdrop(kind, size):
    width, height = size
    image = Image.new("RGB", size, {"plain": (240, 240, 235), "night": (30, 35, 60)}.get(kind, (210, 190, 160)))
    draw = ImageDraw.Draw(image)
    if kind == "sky":
        down, across = np.mgrid[:height, :width] / np.array([height, width])[:, None, None]
        image = Image.fromarray(np.stack([120 + 80 * down, 170 + 50 * down, 230 - 60 * across], -1).astype(np.uint8))
        ImageDraw.Draw(image).rectangle((0, 0.75 * height, width, height), fill=(90, 140, 60))
    elif kind == "room":
        draw.rectangle((0, 0.7 * height, width, height), fill=(120, 80, 50))
        draw.rectangle((0.1 * width, 0.1 * height, 0.4 * width, 0.45 * height), fill=(150, 200, 240))
        draw.rectangle((0.7 * width, 0.3 * height, 0.95 * width, 0.8 * height), fill=(80, 50, 30))
    elif kind == "texture":
        image = soft_noise(32, size)
    elif kind == "checker":
        tiles = Image.fromarray((np.indices((32, 32)).sum(axis=0) % 2 * 200 + 20).astype(np.uint8))
        image = tiles.resize(size, Image.Resampling.NEAREST).convert("RGB")
    elif kind == "coloured noise":
        image = soft_noise((width, height), size)
    return image


def soft_noise(cells, size, seed=7):
    cols, rows = cells if isinstance(cells, tuple) else (cells, cells)
    values = np.random.default_rng(seed).integers(60, 200, (rows, cols, 3)).astype(np.uint8)
    return Image.fromarray(values).resize(size, Image.Resampling.BICUBIC)


def character(image, at=(0.5, 0.55), size=0.16, arm=0.0, coat=(200, 60, 50)):
    """A head with an eye, a body and an arm that is raised by an angle; in shares of the image."""
    image = image.copy()
    draw = ImageDraw.Draw(image)
    x, y, r = at[0] * image.width, at[1] * image.height, size * min(image.size)
    draw.ellipse((x - 0.8 * r, y - 0.2 * r, x + 0.8 * r, y + 2 * r), fill=coat)
    draw.ellipse((x - 0.5 * r, y - 1.1 * r, x + 0.5 * r, y - 0.1 * r), fill=(240, 200, 170))
    draw.ellipse((x + 0.1 * r, y - 0.75 * r, x + 0.3 * r, y - 0.55 * r), fill=(20, 20, 20))
    hand = (x + (0.6 + 1.1 * np.cos(arm)) * r, y + (0.4 - 1.1 * np.sin(arm)) * r)
    draw.line((x + 0.6 * r, y + 0.4 * r, *hand), fill=coat, width=max(2, int(0.3 * r)))
    return image


def noisy(image, deviation):
    values = np.asarray(image) + np.random.default_rng(0).normal(0, deviation, (image.height, image.width, 3))
    return Image.fromarray(values.clip(0, 255).round().astype(np.uint8))


def jpeg(image, quality):
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(BytesIO(buffer.getvalue())).convert("RGB")


def shifted(image, right, down):
    """Shifted; the border is repeated where the image ends."""
    columns = np.clip(np.arange(image.width) - right, 0, image.width - 1)
    rows = np.clip(np.arange(image.height) - down, 0, image.height - 1)
    return Image.fromarray(np.asarray(image)[rows][:, columns])


def brightness(image, factor):
    return ImageEnhance.Brightness(image).enhance(factor)


COPIES = (
    lambda image: noisy(image, 20),
    lambda image: jpeg(image, 30),
    lambda image: brightness(image, 1.08),
    lambda image: brightness(image, 0.92),
    lambda image: shifted(image, 2, -2),
    lambda image: jpeg(brightness(noisy(shifted(image, 2, 1), 8), 1.05), 70),
    lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX),
)
POSES = {
    "arm": {"arm": 1.3},
    "a step": {"at": (0.6, 0.55)},
    "far": {"at": (0.8, 0.55)},
    "larger": {"size": 0.24},
    "coat": {"coat": (40, 80, 200)},
}


def duplicates(*panels, **kwargs):
    (score,) = DuplicateReward(**kwargs)(["p"], [panels[0]], panel_images=[list(panels)])
    return score


class TestDuplicateReward:
    @pytest.mark.parametrize("size", [(256, 256), (384, 640)], ids=str)
    def test_the_numbers_of_the_docstring(self, size):
        copies, poses = {}, {}
        for kind in [*BACKDROPS, "checker", "coloured noise"]:
            image = character(backdrop(kind, size))
            copies[kind] = min(panel_similarity(image, copy(image)) for copy in COPIES)
            for name, pose in POSES.items():
                similarity = panel_similarity(image, character(backdrop(kind, size), **pose))
                poses[name] = max(poses.get(name, 0), similarity)
        assert 0.986 < copies["checker"] == min(copies.values())
        assert poses["coat"] < 0.42 and poses["a step"] < 0.745 and poses["larger"] < 0.75
        assert 0.8 < poses["arm"] < (0.905 if size[0] == size[1] else 0.965)

    def test_a_clear_change_of_brightness_is_no_copy(self):
        image = character(backdrop("room", (256, 256)))
        dimmed = [panel_similarity(image, brightness(image, factor)) for factor in (0.95, 0.7, 0.5)]
        assert dimmed[0] > 0.986 and dimmed[1] < 0.95 and dimmed[2] < 0.8

    def test_is_the_mean_over_all_pairs(self):
        scene = backdrop("plain", (128, 128))
        first, second = character(scene), character(scene, at=(0.8, 0.5))
        assert duplicates(first, second) == 1 and duplicates(first, first, first) == 0
        assert duplicates(first, first, second) == pytest.approx(2 / 3)
        assert duplicates(first, first, second, second) == pytest.approx(4 / 6)

    def test_the_threshold_is_where_the_score_begins_to_fall(self):
        scene = backdrop("room", (256, 256))
        panels = [character(scene), character(scene, at=(0.56, 0.55))]
        similarity = panel_similarity(*panels)
        assert 0.6 < similarity < 0.9
        assert duplicates(*panels, threshold=similarity) == pytest.approx(1)
        expected = (1 - similarity) / (1 - similarity / 2)
        assert duplicates(*panels, threshold=similarity / 2) == pytest.approx(expected)


def scene(seed, size):
    """A drawing that differs from seed to seed; the kind of its backdrop goes round."""
    generator = np.random.default_rng(seed)
    image = backdrop(BACKDROPS[seed % len(BACKDROPS)], size)
    for _ in range(3):
        at, coat = tuple(generator.uniform(0.2, 0.8, 2)), tuple(int(c) for c in generator.integers(0, 255, 3))
        image = character(image, at, generator.uniform(0.08, 0.2), generator.uniform(0, 1.5), coat)
    return image


def grid(rows, cols, size=(512, 512), seed=0, gutter=0, color="white", panels=None):
    width, height = size[0] // cols, size[1] // rows
    panels = panels or [scene(seed + index, (width, height)) for index in range(rows * cols)]
    image = join_grid(panels, rows, cols).resize(size, Image.Resampling.BOX)  # where the size does not divide
    draw = ImageDraw.Draw(image)
    for x in [col * width for col in range(1, cols) if gutter]:
        draw.rectangle((x - gutter // 2, 0, x - gutter // 2 + gutter - 1, size[1]), fill=color)
    for y in [row * height for row in range(1, rows) if gutter]:
        draw.rectangle((0, y - gutter // 2, size[0], y - gutter // 2 + gutter - 1), fill=color)
    return image


class TestLayout:
    @pytest.mark.parametrize("size", SIZES, ids=str)
    @pytest.mark.parametrize(("rows", "cols"), GRIDS)
    def test_grids_of_scenes(self, size, rows, cols):
        for gutter, color in ((0, None), (2, "white"), (4, "black"), (8, "white"), (8, (20, 20, 20))):
            if gutter > 0.08 * min(size[0] / cols, size[1] / rows):
                continue  # wider than the tolerance for edges
            assert layout_score(grid(rows, cols, size, 3, gutter, color), rows, cols) > 0.8, gutter

    @pytest.mark.parametrize("size", SIZES, ids=str)
    @pytest.mark.parametrize("kind", BACKDROPS)
    def test_panels_of_one_background_with_a_gutter(self, size, kind):
        panel = (size[0] // 2, size[1] // 2)
        panels = [character(backdrop(kind, panel), at) for at in ((0.3, 0.4), (0.6, 0.5), (0.5, 0.6), (0.7, 0.4))]
        color = "white" if kind == "night" else "black"
        assert layout_score(grid(2, 2, size, gutter=4, color=color, panels=panels), 2, 2) > 0.8

    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_one_image_is_not_a_grid(self, size):
        down, across = np.mgrid[: size[1], : size[0]] / np.array([size[1], size[0]])[:, None, None]
        pictures = {
            "flat": Image.new("RGB", size, (120, 130, 90)),
            "gradient": Image.fromarray((255 * np.stack([down, across, 0.5 + 0 * down], -1)).astype(np.uint8)),
            "pixels": noisy(Image.new("RGB", size, "gray"), 60),
            **{f"texture {cells}": soft_noise(cells, size) for cells in (8, 32, 64)},
            **{f"scene {seed}": scene(seed, size) for seed in range(6)},
        }
        for name, picture in pictures.items():
            for rows, cols in GRIDS:
                assert layout_score(picture, rows, cols) < 0.3, (name, rows, cols)

    @pytest.mark.parametrize("gutter", [0, 6])
    @pytest.mark.parametrize(
        ("drawn", "wanted"),
        [
            ((2, 3), (2, 2)), ((3, 3), (2, 2)), ((2, 2), (1, 2)), ((2, 2), (2, 1)), ((1, 2), (2, 2)), ((2, 2), (2, 3)),
            ((2, 2), (3, 3)), ((4, 4), (2, 2)), ((1, 4), (1, 2)), ((2, 2), (1, 1)), ((1, 3), (1, 1)),
        ],
    )  # fmt: skip
    def test_another_grid(self, drawn, wanted, gutter):
        image = grid(*drawn, (768, 768), 5, gutter)
        assert layout_score(image, *drawn) > 0.8 and layout_score(image, *wanted) < 0.3

    def test_a_missing_divider_is_in_between(self):
        """Two of the four panels run into one another; then two pairs of panels do, and the grid is 2 x 1."""
        wide = scene(2, (512, 256))
        top, bottom = split_grid(grid(2, 2), 2, 1), split_grid(grid(2, 2, seed=7), 2, 1)
        scores = [
            layout_score(join_grid(rows, 2, 1), 2, 2)
            for rows in ([top[0], bottom[1]], [top[0], wide], [wide, scene(4, (512, 256))])
        ]
        assert scores[0] == 1 and 0.2 < scores[1] < 0.8 and scores[2] < 0.1
        # One line of two
        three = grid(1, 3, (768, 256))
        three.paste(wide, (256, 0))
        assert layout_score(three, 1, 3) == pytest.approx(0.5, abs=0.1)

    def test_edge_profile_is_the_share_of_the_height(self):
        image = Image.new("RGB", (40, 40), "black")
        image.paste("white", (20, 0, 40, 30))
        profile = edge_profile(image, 8)
        # Six of eight bands; the border of the columns 19 and 20 is entry 19, and its neighbours count with it
        expected = np.zeros(39)
        expected[18:21] = 0.75
        assert np.array_equal(profile, expected)

    def test_scores_each_completion_for_its_own_grid(self):
        image = grid(2, 3)
        scores = LayoutReward()(["p"] * 3, [image] * 3, rows=[2, 3, 2], cols=[3, 2, 2], panels=[[]] * 3)
        assert scores == [layout_score(image, 2, 3), layout_score(image, 3, 2), layout_score(image, 2, 2)]
        assert scores[0] > 0.8 > 0.3 > max(scores[1:])


@pytest.mark.parametrize(
    ("text", "recognised", "expected"),
    [
        ("Open today", "OPEN\n to day", 1.0),
        ("Open", "", 0.0),
        ("Open", "Opan", 0.75),  # one letter is another
        ("Open", "Opn", 0.75),  # one is missing
        ("Open", "Opexn", 0.75),  # one too many
        ("Open", "the bakery is open now", 1.0),  # other text around it
        ("ab", "a and b", 0.5),  # other text within
        ("Café １２", "café 12", 1.0),  # wide digits
    ],
)
def test_readability(text, recognised, expected):
    assert readability(text, recognised) == pytest.approx(expected)


def sign(text, size=(320, 160), background="white", color="black", at=(20, 30), height=36):
    image = Image.new("RGB", size, background)
    ImageDraw.Draw(image).text(at, text, font=ImageFont.load_default(height), fill=color)
    return image


@pytest.mark.slow
def test_ocr_reward_reads_words_in_images(capfd):
    pytest.importorskip("rapidocr")
    images = {
        "read": sign("Open Today"),
        "light on dark, small": sign("open today", background="navy", color="yellow", height=26),
        "two lines": sign("OPEN\nTODAY"),
        "with other text": sign("Bakery\nOpen Today\nfresh bread", height=28),
        "misspelt": sign("Opan Tudoy"),
        "other": sign("Warehouse exit"),
        "none": sign(""),
    }
    scores = OcrReward()(["p"] * 7, list(images.values()), text=["Open Today"] * 7, rows=[1] * 7)
    scores = dict(zip(images, scores, strict=True))
    assert all(scores[name] > 0.9 for name in ("read", "light on dark, small", "two lines", "with other text"))
    assert 0.5 < scores["misspelt"] < 0.9
    assert scores["other"] < 0.5 and scores["none"] == 0
    output = capfd.readouterr()
    assert output.out == output.err == ""  # an image without text is not worth a line


class TestDemoRewards:
    @pytest.mark.parametrize(
        ("color", "expected"),
        [("red", 1.0), ("blue", -0.5), ("cyan", -1.0), ("white", 0.0), ((100, 50, 20), 65 / 255)],
    )
    def test_redness(self, color, expected):
        scores = redness_reward(["p"], [Image.new("RGB", (5, 7), color)])
        assert scores == pytest.approx([expected])

    def test_panel_similarity(self):
        black, white, grey = (Image.new("RGB", (16, 16), (value,) * 3) for value in (0, 255, 51))
        completions = [black] * 4
        panel_images = [[grey, grey, grey], [black, white], [black, white, grey], [grey]]
        scores = panel_similarity_reward(["p"] * 4, completions, panel_images=panel_images, panels=[["a"]] * 4)
        # Three pairs: 1, 51 / 255 = 0.2 and 0.8 apart, mean 2 / 3.
        assert scores[:3] == pytest.approx([1.0, 0.0, 1 / 3])
        assert scores[3] is None

    def test_panel_similarity_depends_on_where_the_colors_are(self):
        left = Image.new("RGB", (16, 16), "black")
        left.paste("white", (0, 0, 8, 16))
        right = left.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        assert panel_similarity_reward(["p"], [left], [[left, right]]) == pytest.approx([0.0])
