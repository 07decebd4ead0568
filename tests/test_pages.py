"""The checks of `pages.py` find what is wrong with a page, and nothing in a page that is well."""

import pytest
from pages import low_contrast, overflows, overlaps

CASES = [
    ("<p style='width:900px'>wide</p>", overflows, 1),
    ("<div style='overflow:auto'><p style='width:900px'>scrolls</p></div>", overflows, 0),
    ("<p class=a style='position:absolute;top:0'>one</p><p class=a style='position:absolute;top:4px'>two</p>", None, 1),
    ("<p class=a>one <b class=a>in it</b></p><p class=a>two</p>", None, 0),
    ("<svg width=300><text class=a y=20>one</text><text class=a x=10 y=24>two</text></svg>", None, 1),
    ("<p style='color:#777'>4.48 to 1</p>", low_contrast, 1),
    ("<p style='color:#767676'>4.54 to 1</p>", low_contrast, 0),
    ("<p style='color:#949494;font-size:24px'>3.03 to 1, large</p>", low_contrast, 0),
    ("<p style='opacity:.5'>black at half is 3.95 to 1</p>", low_contrast, 1),
    ("<div style='background:#222'><p style='color:#767676'>3.5 to 1</p></div>", low_contrast, 1),
    ("<div style='background:#000'><p style='background:rgba(255,255,255,.9)'>18 to 1</p></div>", low_contrast, 0),
    ("<svg><text y=20 fill='#777'>4.48 to 1</text></svg>", low_contrast, 1),
    ("<p style='color:#fff;display:none'>unseen</p>", low_contrast, 0),
]


@pytest.mark.parametrize(("body", "check", "faults"), CASES)
def test_each_fault_is_found_and_only_it(browser, body, check, faults):
    page = browser.new_page(viewport={"width": 400, "height": 300})
    page.set_content(f"<body style='margin:0'>{body}")
    assert len(check(page) if check else overlaps(page, ".a")) == faults
    page.close()
