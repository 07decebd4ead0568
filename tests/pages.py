"""What a look at a page would find: it is wider than its window, texts cover each other, or are too pale to read.

Each function takes a Playwright page and returns one line per fault: `assert overflows(page) == []`.
"""

CONTRAST = 4.5
"""WCAG 2.2 AA for text of normal size; text from 24 px, or bold from 18.66 px, needs `LARGE_CONTRAST`."""
LARGE_CONTRAST = 3.0

_NAME = """
const name = (e) => e.localName + (e.id ? '#' + e.id : '')
  + [...e.classList].map((c) => '.' + c).join('') + ' "' + e.textContent.trim().slice(0, 40) + '"';
const seen = (e) => e.checkVisibility({ opacityProperty: true, visibilityProperty: true })
  && e.getClientRects().length && ![...parents(e)].some((p) => clipped(p));
function* parents(e) { for (; e; e = e.parentElement) yield e; }
const clipped = (e) => { const box = e.getBoundingClientRect();
  return getComputedStyle(e).position === 'absolute' && box.width <= 1 && box.height <= 1; };  // for screen readers
"""


def overflows(page) -> list[str]:
    """The elements that reach beyond the window's right edge, if the document is wider than its window."""
    return page.evaluate(f"""() => {{ {_NAME}
        const wide = document.documentElement.clientWidth;
        if (document.documentElement.scrollWidth <= wide) return [];
        return [...document.body.querySelectorAll('*')]
            .filter((e) => seen(e) && e.getBoundingClientRect().right > wide + 1)
            .map((e) => `${{name(e)}} reaches to ${{Math.round(e.getBoundingClientRect().right)}} of ${{wide}} px`);
    }}""")


def overlaps(page, selector: str) -> list[str]:
    """Pairs of visible elements of the selector, neither inside the other, whose boxes share more than a pixel."""
    return page.evaluate(
        f"""(selector) => {{ {_NAME}
        const found = [...document.querySelectorAll(selector)].filter((e) => seen(e) && e.textContent.trim())
            .map((e) => [e, e.getBoundingClientRect()]);
        const cover = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
        return found.flatMap(([a, left], i) => found.slice(i + 1)
            .filter(([b, right]) => !a.contains(b) && !b.contains(a) && cover(left, right))
            .map(([b]) => `${{name(a)}} and ${{name(b)}}`));
    }}""",
        selector,
    )


def low_contrast(page) -> list[str]:
    """Visible texts, in HTML and SVG, whose colour is too close to what is painted behind them.

    The background is that of the ancestors, blended where they are translucent; pictures behind a text do not count.
    """
    return page.evaluate(
        f"""([normal, large]) => {{ {_NAME}
        const context = Object.assign(document.createElement('canvas'), {{ width: 1, height: 1 }})
            .getContext('2d', {{ willReadFrequently: true }});
        const rgba = (colour) => {{  // whatever notation the style has, as [r, g, b, alpha]
            context.clearRect(0, 0, 1, 1); context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
            const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; }};
        const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
        const ground = (e) => [...parents(e)].reverse().map((p) => rgba(getComputedStyle(p).backgroundColor))
            .reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
        const light = (c) => c.slice(0, 3).map((v) => v / 255)
            .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const faded = (e) => [...parents(e)].reduce((product, p) => product * Number(getComputedStyle(p).opacity), 1);
        return [...document.body.querySelectorAll('*')].filter((e) => seen(e) && !e.disabled
            && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())
            && !e.closest('script, style, noscript')).map((e) => {{
                const style = getComputedStyle(e), below = ground(e), size = parseFloat(style.fontSize);
                const ink = rgba(e instanceof SVGElement ? style.fill : style.color);
                const [a, b] = [over([...ink.slice(0, 3), ink[3] * faded(e)], below), below].map(light);
                const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
                const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? large : normal;
                return ratio < needed ? `${{name(e)}} has ${{ratio.toFixed(2)}}, needs ${{needed}}` : null;
            }}).filter(Boolean);
    }}""",
        [CONTRAST, LARGE_CONTRAST],
    )
