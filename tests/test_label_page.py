"""The labelling page in Chromium: keys, mouse and touch, two people, hostile replies, a server that is killed."""

import http.client
import json
from contextlib import contextmanager

import pytest
from browsing import LAPTOP, PHONE, visit
from cases import cases, slow
from labelling import post, serving
from texts import write_rows

from operant.tools.labels.items import Item
from operant.tools.labels.server import LabelServer, order
from operant.tools.labels.store import Store

HOSTILE = [
    "<script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title = 'owned'\"><b>bold</b>",
    "</textarea>{{7*7}} javascript:alert(1) \u202e \x00 &amp;",
]
ITEMS = [
    Item(f"secret-id-{i}", f"Question {i}", (f"{i} red", f"{i} green", f"{i} blue"), ("model-a",) * 3) for i in range(4)
]


@pytest.fixture
def served(tmp_path):
    opened = []

    def serve(kind="pick", items=ITEMS, overlap=2):
        store = Store(tmp_path / f"{kind}.sqlite", kind=kind, overlap=overlap)
        store.add_items(items)
        server = LabelServer(store)
        server.start()
        opened.append(server)
        return server

    yield serve
    for server in opened:
        server.stop()
        server.store.close()


@contextmanager
def labelling(browser, server, name="anna", size=LAPTOP, scheme="light"):
    """The page, with a name typed in and an item shown."""
    with visit(browser, server.url.partition("#")[0], size, scheme) as page:
        page.get_by_text("The address lacks its token").wait_for()
        page.goto(server.url)
        page.get_by_label("Your name").fill(name)
        page.get_by_role("button", name="Begin").click()
        page.locator("#work:visible, #rest:visible").first.wait_for()
        yield page


def number(server, text, name="anna"):
    item = next(item for item in ITEMS if text in item.replies)
    return order(name, item.id, len(item.replies)).index(item.replies.index(text)) + 1


def shows(page, prompt):
    page.locator("#prompt", has_text=prompt).wait_for()


def stored(page, done):
    page.locator("#count", has_text=f"{done} of").wait_for()


def press(page, *keys):
    for key in keys:
        page.keyboard.press(str(key))


def answers(server):
    return [(label.labeller, label.answer) for label in server.store.labels()]


def card(page, text):
    return page.locator(".card", has_text=text)


# --- keys, mouse, touch -----------------------------------------------------------------------------------------------
def test_picking_by_keys(browser, served):
    server = served()
    with labelling(browser, server) as page:
        shows(page, "Question 0")
        press(page, number(server, "0 green"))
        shows(page, "Question 1")
        press(page, "c", *"2 are the same", "Escape", "t")  # digits and letters of a comment are no keys
        shows(page, "Question 2")
        press(page, 0)
        shows(page, "Question 3")
        press(page, "s")
        page.get_by_text("that was the last one").wait_for()
        assert page.locator("#count").inner_text() == "4 of 4"
    assert answers(server) == [
        ("anna", {"best": 1}),
        ("anna", {"ranks": [1, 1, 1], "comment": "2 are the same"}),
        ("anna", {"ranks": [None] * 3, "all_bad": True}),
    ]
    assert [label.item for label in server.store.skipped()] == ["secret-id-3"]
    assert all(0 <= label.seconds < 60 for label in server.store.labels())


def test_ranking_by_keys_with_a_tie_and_a_reload(browser, served):
    server = served("rank")
    red, green, blue = (number(server, f"0 {colour}") for colour in ("red", "green", "blue"))
    with labelling(browser, server) as page:
        press(page, "ArrowDown", blue, red, green, "t")  # the keyboard is in a card; blue, then red = green
        assert page.locator(".place:visible").all_inner_texts() == ["1st", "2nd", "2nd"]
        press(page, red)
        assert page.locator(".place:visible").all_inner_texts() == ["1st", "2nd"]  # green was tied with red alone
        press(page, red, "t", "ArrowUp", "Shift+ArrowUp", "c", *"hm")  # green goes to the top, and leaves red its place
        page.reload()
        page.locator(".place:visible").nth(2).wait_for()
        assert page.locator("#ranked .number").all_inner_texts() == [str(green), str(blue), str(red)]
        assert page.get_by_label("Comment", exact=True).input_value() == "hm"
        press(page, "Enter")
        shows(page, "Question 1")
        press(page, number(server, "1 red"), "Enter")
        shows(page, "Question 1")  # one reply is no order
        press(page, number(server, "1 green"), "e")
        shows(page, "Question 2")
    assert [answer for _, answer in answers(server)] == [{"ranks": [3, 1, 2], "comment": "hm"}, {"ranks": [1, 2, None]}]


@cases(
    ("rate", ("5", "ArrowDown", "1", "Enter"), {"ratings": [5, None, 1]}),
    slow("good", ("g", "b", "g", "Enter"), {"good": [True, False, True]}),
    slow("rate", ("5", "2", "ArrowUp", "4", "3", "Enter"), {"ratings": [5, 4, 3]}),
    slow("good", ("2", "3", "3", "Enter"), {"good": [None, True, False]}),
    slow("good", ("x",), {"good": [False] * 3, "all_bad": True}),
)
def test_marks_by_keys(kind, keys, expected, browser, served):
    """expected: by the order on the page."""
    server = served(kind)
    with labelling(browser, server) as page:
        press(page, *keys)
        shows(page, "Question 1")
    ((_, answer),) = answers(server)
    field = next(name for name in ("ratings", "good") if name in expected)
    places = order("anna", ITEMS[0].id, 3)
    assert [answer[field][place] for place in places] == expected[field] and answer.keys() == expected.keys()


@pytest.mark.slow
def test_ranking_by_dragging(browser, served):
    server = served("rank")
    with labelling(browser, server) as page:
        for colour in ("green", "blue", "red"):
            handle, zone = card(page, f"0 {colour}").locator(".handle"), page.locator("#ranked")
            box, target = handle.bounding_box(), zone.bounding_box()
            page.mouse.move(box["x"] + 10, box["y"] + 10)
            page.mouse.down()
            place = page.locator("#ranked .ghost", has_text=colour)  # where it will be
            for step in range(200):  # a hand is never quite still, and a busy page misses some of its moves
                page.mouse.move(target["x"] + 60 + step % 3, target["y"] + target["height"] - 6, steps=4)
                if place.is_visible():
                    break
                page.wait_for_timeout(50)
            place.wait_for()
            page.mouse.up()
            page.locator("#ranked .card:not(.ghost)", has_text=colour).wait_for()
            slides = "document.getAnimations().map((it) => it.finished)"  # of cards to their places
            page.evaluate(f"Promise.allSettled({slides}).then(() => 0)")
        page.locator("#replies .card").wait_for(state="detached")
        page.get_by_role("button", name="Done").click()
        shows(page, "Question 1")
    assert sorted(answers(server)[0][1]["ranks"]) == [1, 2, 3]
    assert answers(server)[0][1]["ranks"][1] == 1, "green was there first, and others were dropped below it"


@pytest.mark.parametrize("kind", ["pick", "rank", "rate", "good"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_everything_by_touch_on_a_phone(browser, served, kind, scheme):
    server = served(kind)
    with labelling(browser, server, size=PHONE, scheme=scheme) as page:
        if kind == "pick":
            card(page, "0 blue").get_by_role("button", name="This one is best").click()
            shows(page, "Question 1")  # buttons of the question that leaves have no height
        for colour, taps in (("blue", "Next best 5 Good"), ("red", "Next best 2 Bad")) if kind != "pick" else ():
            name = {"rank": taps[:9], "rate": taps[10:11], "good": taps[12:]}[kind]
            card(page, f"0 {colour}").locator("button:visible", has_text=name).click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        sizes = page.locator("button:visible").evaluate_all("all => all.map(b => b.getBoundingClientRect().height)")
        assert min(sizes) >= 44, "large enough for a thumb"
        if kind != "pick":
            page.get_by_role("button", name="Done").click()
        shows(page, "Question 1")
    expected = {"pick": {"best": 2}, "rank": {"ranks": [2, None, 1]}, "rate": {"ratings": [2, None, 5]}}
    assert answers(server) == [("anna", expected.get(kind, {"good": [False, None, True]}))]


def test_undo_goes_back_and_shows_what_was_chosen(browser, served):
    server = served("rate")
    with labelling(browser, server) as page:
        assert page.locator("#undo").is_disabled()
        press(page, 5, 4, 3, "Enter")
        shows(page, "Question 1")
        press(page, "s")
        shows(page, "Question 2")
        press(page, "u")
        shows(page, "Question 1")
        press(page, "Control+z")
        shows(page, "Question 0")
        assert page.locator("[aria-pressed=true]").all_inner_texts() == ["5", "4", "3"]
        press(page, 1, "Enter")
        shows(page, "Question 1")
        stored(page, 1)
    assert [label.action for label in server.store.history()] == ["label", "skip", "undo", "undo", "label"]
    assert sorted(answers(server)[0][1]["ratings"]) == [1, 3, 4]


# --- closed, killed, several pages ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_label_survives_a_server_that_is_killed(browser, tmp_path):
    rows = [{"prompt": f"Question {i}", "replies": ["a", "b"]} for i in range(3)]
    path = write_rows(tmp_path / "replies.jsonl", rows)
    context = browser.new_context()
    page = context.new_page()
    with serving(path) as (process, url):
        page.goto(url)
        page.get_by_label("Your name").fill("anna")
        page.keyboard.press("Enter")
        shows(page, "Question 0")
        process.kill()
        process.wait()
        page.keyboard.press("1")
        page.get_by_text("Your label is kept here").wait_for()
    with serving(path) as (_, again):
        assert again == url
        shows(page, "Question 1")
        assert page.locator("#trouble").is_hidden()
        page.keyboard.press("2")
        shows(page, "Question 2")
    context.close()
    with Store(tmp_path / "replies.labels.sqlite") as store:
        assert len(store.history()) == 2


def test_two_people_see_the_same_prompts_in_orders_of_their_own(browser, served):
    server = served()
    with labelling(browser, server) as anna, labelling(browser, server, "ben", PHONE) as ben:
        for page in (anna, ben):
            for i in range(4):
                shows(page, f"Question {i}")
                press(page, 1)
            page.get_by_text("that was the last one").wait_for()
    names = ("anna", "ben")
    best = [[answer["best"] for labeller, answer in answers(server) if labeller == name] for name in names]
    assert best == [[order(name, item.id, 3)[0] for item in ITEMS] for name in names] and best[0] != best[1]


@pytest.mark.slow
def test_two_pages_of_one_person_on_one_item(browser, served):
    server = served()
    with labelling(browser, server) as one, labelling(browser, server) as other:
        one.keyboard.press(str(number(server, "0 red")))
        shows(one, "Question 1")
        other.keyboard.press(str(number(server, "0 blue")))
        other.get_by_text("your new label counts").wait_for()
        shows(other, "Question 1")
        one.keyboard.press("u")  # of a label that was replaced
        one.get_by_text("withdrawn or replaced on another page").wait_for()
    assert answers(server) == [("anna", {"best": 2})] and len(server.store.history()) == 2


@pytest.mark.slow
def test_a_page_without_replies_waits_for_those_of_another_process(browser, served):
    server = served(items=[])
    with labelling(browser, server) as page:
        page.get_by_text("No more replies right now").wait_for()
        with Store(server.store.path) as other:
            other.add_items(ITEMS[:1])
            shows(page, "Question 0")
            page.keyboard.press("1")
            assert len(other.wait([ITEMS[0].id], timeout=20)[ITEMS[0].id]) == 1


# --- hostile texts and requests ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["pick", slow("rank")])
def test_replies_are_shown_as_text_and_sources_are_not(browser, served, kind):
    hostile = Item("x", [{"role": "<u>system</u>", "content": HOSTILE[0]}], (*HOSTILE, "", " \n"))
    bodies = []
    with labelling(browser, served(kind, [hostile, *ITEMS])) as page:
        page.on("response", lambda response: bodies.append(response.text()))
        shown = page.locator(".card .text").evaluate_all("all => all.map(one => one.textContent)")
        assert sorted(shown) == sorted([*HOSTILE, "(empty reply)", "(only white space)"])
        assert page.locator("#prompt").evaluate("p => p.textContent") == "<u>system</u>" + HOSTILE[0]
        assert page.locator("main img, main b, main u, main script").count() == 0
        assert "owned" not in page.title()
        page.reload()
        shows(page, "<u>system</u>")
        press(page, "s")
        shows(page, "Question 0")
    assert any("0 red" in body for body in bodies)
    assert not any(secret in body for body in bodies for secret in ("model-a", "secret-id"))


BODIES = ("{", "[]", "[" * 50_000, json.dumps({"labeller": "import"}), json.dumps({"labeller": "x" * 99}))
LABELS = ({"item": 99}, {"item": "1"}, {"item": 10**400}, {"key": "short"})
ANSWERS = ({"ratings": [10**400] * 3}, {"best": 7}, {"good": [True] * 3}, {"best": 0, "comment": 5})
HOSTS = ({"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example:80"}, {"Origin": "http://evil.example"})
REQUESTS = (
        *((headers, 403) for headers in (*HOSTS, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"})),
        *(({"Authorization": token}, 401) for token in ("Bearer wrong", "")),
        *(({}, 200), ({"Content-Type": "text/plain"}, 415), ({"Content-Length": "99"}, 408), ({"method": "GET"}, 405)),
        *(({"path": "/labels.sqlite"}, 404), ({"path": "/../store.py"}, 404), ({"body": " " * 200_000}, 413)),
        *(({"body": body}, 400) for body in BODIES),
        *(({"label": label}, 400) for label in (*LABELS, *({"answer": answer} for answer in ANSWERS))),
        ({"path": "/undo", "body": json.dumps({"labeller": "anna", "label": 10**400})}, 400),
)  # fmt: skip


def test_requests_that_are_not_of_the_page_are_refused(served):
    server = served()
    server.patience = 1
    usual = {"Origin": f"http://127.0.0.1:{server.port}", "Authorization": f"Bearer {server.token}"}
    usual["Content-Type"] = "application/json"
    for change, status in REQUESTS:
        headers = usual | {name: value for name, value in change.items() if name[0].isupper()}
        path, known = change.get("path", "/next"), {"labeller": "anna"}
        if "label" in change:
            path, known = "/label", known | {"item": 1, "answer": {"best": 0}, "key": "k" * 9} | change["label"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request(change.get("method", "POST"), path, change.get("body", json.dumps(known)), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        assert answer.status == status, (change, text)
        assert ("Question 0" in text) == (status == 200) and ("error" in json.loads(text)) == (status != 200), change
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"], change
    assert server.store.history() == []


def test_a_label_that_the_disk_refused_is_stored_when_it_is_sent_again(served):
    server = served()
    item = {"labeller": "anna", "item": 1, "answer": {"best": 0, "comment": "x" * 9_000}, "key": "k" * 9}
    database = server.store._connection
    database.execute("PRAGMA max_page_count = 1")  # no page more than there are
    status, answer = post(server.url, "/label", **item)
    assert status == 503 and "disk is full" in answer["error"] and server.store.history() == []
    database.execute("PRAGMA max_page_count = 100000")
    assert post(server.url, "/label", **item)[0] == post(server.url, "/label", **item)[0] == 200
    assert len(server.store.history()) == 1
