# SPDX-License-Identifier: Apache-2.0
"""Images of every mode on their way to RGB: what is transparent, what has 16 bits, what is refused."""

from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import ExifTags, Image

from paco_trl.image_benchmarks.system_images import image_file_size, load_image_file
from paco_trl.utils.images import to_rgb
from paco_trl.utils.vision_language import load_image, patch_size_of
from testing_utils import noise


WHITE = (255, 255, 255)
# A dark ramp, a middle grey and white; Pillow's own conversion makes all but the first white
GREY_16 = np.array([[0, 257, 514], [25700, 32896, 65535]], dtype=np.uint16)
GREY_8 = np.array([[0, 1, 2], [100, 128, 255]], dtype=np.uint8)


def reopened(image, **options):
    """As it comes back from a PNG."""
    image.save(buffer := BytesIO(), "PNG", **options)
    return Image.open(buffer)


def grey_16(mode):
    data = GREY_16.astype(">u2" if mode == "I;16B" else "<u2").tobytes()
    return Image.frombytes(mode, (3, 2), data)


def pixels(image):
    """Colours of an image of one row."""
    return [image.getpixel((x, 0)) for x in range(image.width)]


class TestWithoutTransparency:
    @pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK"])
    def test_is_converted_by_pillow(self, mode):
        image = noise(0, mode=mode)
        converted = to_rgb(image, "It")
        assert image.mode == mode and converted.mode == "RGB" and (converted is image) == (mode == "RGB")
        assert np.array_equal(np.asarray(converted), np.asarray(image.convert("RGB")))

    def test_what_has_no_colors_is_refused(self):
        with pytest.raises(ValueError, match="'La'"):
            to_rgb(noise(0, mode="LA").convert("La"), "It")
        for mode, size in (("RGB", (0, 3)), ("I;16", (3, 0))):
            with pytest.raises(ValueError, match=f"^Panel 1 has {size[0]} x {size[1]} pixels"):
                to_rgb(Image.new(mode, size), "Panel 1")


def test_arrays_of_bytes_are_images():
    pixels = np.random.default_rng(0).integers(256, size=(56, 84, 3), dtype=np.uint8)
    images = [load_image(source, 14, "The first") for source in (pixels, Image.fromarray(pixels))]
    assert np.array_equal(*images) and np.asarray(images[0]).std() > 50
    with pytest.raises(
        ValueError, match="The first cannot be read: ValueError: an array of float64; pass one of uint8"
    ):
        load_image(pixels / 255, 14, "The first")


class TestTransparency:
    """On white, and not the colour that lies hidden behind it."""

    def test_rgba_is_blended_with_white(self):
        image = Image.new("RGBA", (3, 1))
        for x, alpha in enumerate([255, 51, 0]):
            image.putpixel((x, 0), (0, 100, 255, alpha))
        # A fifth of the colour and four fifths of white: 204, 224, 255
        assert pixels(to_rgb(image, "It")) == [(0, 100, 255), (204, 224, 255), WHITE]
        assert image.convert("RGB").getpixel((2, 0)) == (0, 100, 255)  # the effect: Pillow shows the hidden colour

    def test_la_and_pa(self):
        for mode in ("LA", "PA"):
            image = Image.new(mode, (2, 1), (10, 255))
            if mode == "PA":
                image.putpalette([10, 10, 10] * 11)
            image.putpixel((1, 0), (10, 0))
            assert pixels(to_rgb(image, "It")) == [(10, 10, 10), WHITE]

    @pytest.mark.parametrize(
        ("mode", "dark", "transparent"), [("P", 0, 1), ("RGB", (7, 7, 7), (9, 9, 9)), ("1", 1, 0)]
    )
    def test_an_entry_that_names_a_colour(self, mode, dark, transparent):
        image = Image.new(mode, (2, 1), dark)
        if mode == "P":
            image.putpalette([7, 7, 7, 9, 9, 9])
        image.putpixel((1, 0), transparent)
        plain, named = reopened(image), reopened(image, transparency=transparent)
        assert "transparency" in named.info and "transparency" not in plain.info
        first, second = pixels(to_rgb(named, "It"))
        assert second == WHITE and first == to_rgb(plain, "It").getpixel((0, 0))
        assert to_rgb(plain, "It").getpixel((1, 0)) == ((9, 9, 9) if mode != "1" else (0, 0, 0))


class TestSixteenBits:
    @pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
    def test_is_scaled_to_eight(self, mode):
        image = Image.fromarray(GREY_16.astype(np.int32)) if mode == "I" else grey_16(mode)
        assert image.mode == mode
        converted = np.asarray(to_rgb(image, "It"))
        assert np.array_equal(converted, np.repeat(GREY_8[..., None], 3, axis=-1))
        # The effect: elsewhere all but black would be white
        assert not np.array_equal(np.asarray(image.convert("RGB"))[..., 0], GREY_8)

    def test_eight_bits_in_thirty_two_stay(self):
        image = Image.linear_gradient("L").convert("I")
        assert np.array_equal(np.asarray(to_rgb(image, "It"))[..., 0], np.asarray(Image.linear_gradient("L")))
        image.info["transparency"] = 0
        assert np.asarray(to_rgb(image, "It"))[:2, 0, 0].tolist() == [255, 1]

    def test_a_transparent_grey_is_white(self):
        image = Image.fromarray(GREY_16)
        image.info["transparency"] = 514
        assert np.asarray(to_rgb(image, "It"))[..., 0].tolist() == [[0, 1, 255], [100, 128, 255]]

    @pytest.mark.parametrize(
        ("values", "kind"), [([0, 65536], np.int32), ([-1, 10], np.int32), ([0, 0.5], np.float32)]
    )
    def test_a_range_that_is_not_known_is_refused(self, values, kind):
        values = np.array([values], kind)
        with pytest.raises(ValueError, match=f"^Panel 3 .* {values.min()} to {values.max()}"):
            to_rgb(Image.fromarray(values), "Panel 3")


class TestLoadImage:
    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK"])
    def test_all_sources_give_the_same(self, mode, tmp_path):
        image, path = noise(0, (90, 61), mode), tmp_path / ("a.png" if mode != "CMYK" else "a.tif")
        image.save(path)
        data = path.read_bytes()
        expected = np.asarray(load_image(image, 14, ""))
        assert expected.shape == (56, 84, 3) and expected.std() > 5
        for source in (path, str(path), data, {"bytes": data, "path": None}):
            assert np.array_equal(np.asarray(load_image(source, 14, "")), expected)

    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
    def test_exif_turns_it_as_in_a_dataset(self, tmp_path, kind):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        path = tmp_path / f"a.{kind.lower()}"
        noise(0, (84, 56)).save(path, kind, exif=exif)
        in_dataset = Dataset.from_dict({"image": [str(path)]}).cast_column("image", ImageFeature())[0]["image"]
        assert in_dataset.size == (56, 84)
        for source in (path, path.read_bytes(), {"bytes": None, "path": str(path)}, Image.open(path), in_dataset):
            assert np.array_equal(np.asarray(load_image(source, 14, "")), np.asarray(in_dataset))
        assert np.array_equal(np.asarray(load_image_file(path)), np.asarray(in_dataset))
        assert image_file_size(path) == (84, 56)

    @pytest.mark.parametrize("size", [(10, 2500), (8000, 40), (2500, 10)])
    def test_sides_that_no_judge_takes(self, size):
        with pytest.raises(ValueError, match="First image.*aspect ratio"):
            load_image(Image.new("RGB", size), 14, "First image")

    @pytest.mark.parametrize(("value", "expected"), [(16, 16), ({"height": 12, "width": 12}, 12), (None, 14)])
    def test_patch_size_of_a_processor(self, value, expected):
        processor = SimpleNamespace(image_processor=SimpleNamespace(patch_size=value))
        assert patch_size_of(processor) == expected
        assert load_image(noise(0, (90, 70)), 16, "").size == (96, 64)
