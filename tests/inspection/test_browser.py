# SPDX-License-Identifier: Apache-2.0
"""The page in a browser: what a reader sees and does. Run by `make test-browser`; CHROMIUM names the browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nnfront as nn

pytestmark = pytest.mark.browser
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
SECONDS = 1.0
"""A page is there in less, for a model of any size."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "small.html"
    path.write_text(nn.page(FOLDER), encoding="utf-8")
    return path


@pytest.fixture
def page(browser: Any, small: Path) -> Iterator[Any]:
    yield from opened(browser, small)


def opened(browser: Any, path: Path) -> Iterator[Any]:
    """Yield the page, and hold afterwards that it asked for nothing and that its script made no mistake."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(60_000)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready")
    yield page
    assert not faults
    assert asked == [path.as_uri()]
    page.close()


def node(page: Any, module: str, op: str) -> Any:
    return page.locator(f'.node[data-module="{module}"]', has_text=op)


def test_a_model_of_70_billion_parameters_opens_in_under_a_second(
    browser: Any, large_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "large.html"
    path.write_text(nn.page(large_folder), encoding="utf-8")
    times = []
    for _ in range(3):
        for page in opened(browser, path):
            times.append(float(page.evaluate("document.documentElement.dataset.ready")) / 1e3)
            assert page.locator(".node", has_text="80 × LlamaDecoderLayer_2").count() == 1
    assert min(times) < SECONDS, times


def test_it_opens_with_the_graph_of_decode_its_layers_folded(page: Any) -> None:
    assert page.locator("#name").inner_text() == "pylib-3m"
    assert page.locator('#methods button[aria-pressed="true"]').inner_text() == "decode"
    assert node(page, "model.layers", "4 × LlamaDecoderLayer_2").is_visible()
    assert page.locator(".node", has_text="attention").count() == 0


def test_boxes_do_not_overlap_and_lie_within_their_group(page: Any) -> None:
    page.locator("#unfold").click()
    faults = page.evaluate(
        """() => {
            const faults = [], groups = [[...document.querySelectorAll('#world > .node, #world > .group')], ...[...document.querySelectorAll('.group')].map((group) => [...group.querySelectorAll(':scope > g > .node, :scope > g > .group')])];
            for (const boxes of groups) {
                const places = boxes.map((box) => box.querySelector(':scope > .face, :scope > .frame').getBoundingClientRect());
                places.forEach((a, i) => places.slice(i + 1).forEach((b) => { if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) faults.push(['overlap', boxes[i].dataset.key]); }));
                const around = boxes[0].parentElement.closest('.group')?.querySelector(':scope > .frame').getBoundingClientRect();
                if (around) places.forEach((a, i) => { if (a.left < around.left || a.right > around.right || a.top < around.top || a.bottom > around.bottom) faults.push(['outside', boxes[i].dataset.key]); });
            }
            return faults;
        }"""
    )
    assert faults == []
    assert page.locator(".node").count() > 30


def test_a_layer_unfolds_in_place_and_folds_again(page: Any) -> None:
    node(page, "model.layers", "4 × LlamaDecoderLayer_2").click()
    assert [page.locator(f'.node[data-module="model.layers.{i}"]').count() for i in range(5)] == [
        1,
        1,
        1,
        1,
        0,
    ]
    page.locator('.node[data-module="model.layers.2"]').click()
    assert page.locator('.group.call[data-module="model.layers.2"]').count() == 1
    node(page, "model.layers.2.self_attn", "ops").click()
    assert node(page, "model.layers.2.self_attn", "attention").is_visible()
    assert page.locator('.node[data-module="model.layers.1.self_attn"]').count() == 0
    page.locator('.group.call[data-module="model.layers.2"] > .head').click()
    assert page.locator('.node[data-module="model.layers.2.self_attn"]').count() == 0
    page.locator("#fold").click()
    assert page.locator('.node[data-module="model"]').count() == 1


def test_search_finds_an_op_in_a_shared_layer_and_unfolds_what_it_is_in(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("self_attn attention")
    first = page.locator("#found li").first
    assert first.inner_text().split("\n") == ["op", "self_attn.attention", "in LlamaDecoderLayer_2"]
    assert first.locator("mark").inner_text() == "self_attn"
    page.keyboard.press("Enter")
    assert not page.locator("#found").is_visible()
    picked = page.locator(".node.picked")
    assert picked.get_attribute("data-module") == "model.layers.0.self_attn"
    place, stage = picked.bounding_box(), page.locator("#canvas").bounding_box()
    assert abs(place["x"] + place["width"] / 2 - stage["x"] - stage["width"] / 2) < 8
    assert abs(place["y"] + place["height"] / 2 - stage["y"] - stage["height"] / 2) < 8


def test_search_says_when_nothing_is_found(page: Any) -> None:
    page.locator("#search").fill("no such thing")
    assert page.locator("#found").inner_text() == "Nothing has all of these words."
    page.keyboard.press("Escape")
    assert not page.locator("#found").is_visible()


def test_details_of_an_op_name_its_weight_kernel_and_source_line(page: Any) -> None:
    page.evaluate("search('self_attn.o_proj linear')[0].go()")
    details = page.locator("#details")
    assert details.locator(".link").inner_text() == "model.layers.0.self_attn.o_proj.weight"
    assert details.locator(".kernel b").first.inner_text().startswith("linear → ")
    assert "self.o_proj(" in details.locator(".source .here").inner_text()
    details.locator(".link").click()
    assert page.locator("#weights").is_visible()
    row = page.locator("#weights tr.picked")
    assert row.get_attribute("data-weight") == "model.layers.0.self_attn.o_proj.weight"
    page.locator("#weights button", has_text="Show in the graph").click()
    assert page.locator("#world .picked").get_attribute("data-module") == "model.layers.0"


def test_hovering_says_what_an_op_is(page: Any) -> None:
    tip = page.locator("#tip")
    assert not tip.is_visible()
    node(page, "model.norm", "rms_norm").hover()
    source = (FOLDER.parents[1] / "models" / "llama.py").read_text().splitlines()
    line = source.index("        return self.norm(x_BSD)") + 1
    assert tip.inner_text().split("\n") == [
        "rms_norm",
        "model.norm",
        "bfloat16[batch, 1, 256]",
        f"llama.py:{line}",
    ]
    page.locator("#name").hover()
    assert not tip.is_visible()


def test_a_wheel_zooms_about_the_pointer_and_dragging_moves(page: Any) -> None:
    box = node(page, "model.norm", "rms_norm")
    before = box.bounding_box()
    x, y = before["x"] + before["width"] / 2, before["y"] + before["height"] / 2
    page.mouse.move(x, y)
    page.mouse.wheel(0, -400)
    page.wait_for_function("view.scale > 1.2")
    after = box.bounding_box()
    assert after["width"] > 1.3 * before["width"]
    assert abs(after["x"] + after["width"] / 2 - x) < 3
    page.mouse.down()
    page.mouse.move(x + 120, y + 40, steps=4)
    page.mouse.up()
    moved = box.bounding_box()
    assert (round(moved["x"] - after["x"]), round(moved["y"] - after["y"])) == (120, 40)
    assert page.locator(".picked").count() == 0


def test_weights_of_all_layers_are_one_row_that_unfolds(page: Any) -> None:
    page.locator("#tabs button", has_text="Weights").click()
    row = page.locator('tr[data-weight="model.layers.*.mlp.gate_up.weight"]')
    assert "× 4" in row.inner_text()
    assert page.locator("#weights tbody tr").count() == 8
    row.click()
    assert page.locator("#weights tbody tr").count() == 12
    page.locator('tr[data-weight="model.layers.1.mlp.gate_up.weight"]').click()
    sources = page.locator("tr.source-row").all_inner_texts()
    assert [text.split("\t")[0] for text in sources] == [
        f"from model.layers.1.mlp.{name}.weight" for name in ("gate_proj", "up_proj")
    ]
    row.click()
    assert page.locator("#weights tbody tr").count() == 8


def test_the_memory_picture_has_a_rectangle_for_each_buffer_none_above_another(page: Any) -> None:
    page.locator("#tabs button", has_text="Memory").click()
    faults = page.evaluate(
        """() => {
            const pieces = stacked(data.memory.methods.decode.buffers), faults = [];
            pieces.forEach((a, i) => pieces.slice(i + 1).forEach((b) => { if (a.first <= b.last && b.first <= a.last && a.low < b.low + b.bytes && b.low < a.low + a.bytes) faults.push([a.name, b.name]); }));
            return faults;
        }"""
    )
    assert faults == []
    count = page.evaluate("data.memory.methods.decode.buffers.reduce((sum, each) => sum + each[4].length, 0)")
    assert page.locator("#memory .piece").count() == count
    page.locator("#memory .piece").last.hover()
    assert "steps" in page.locator("#tip").inner_text()


def test_kernels_and_dims_have_their_tabs(page: Any) -> None:
    page.locator("#tabs button", has_text="Kernels").click()
    row = page.locator('#kernels tr[data-kernel="qkv_attention"]')
    assert "× 4" in row.inner_text()
    row.click()
    assert "model.layers.3.self_attn" in row.locator("xpath=following-sibling::tr[1]").inner_text()
    page.locator("#tabs button", has_text="Dims").click()
    assert "decode binds it by 'cache' max_seq" in page.locator('.dim[data-dim="max_seq"]').inner_text()
