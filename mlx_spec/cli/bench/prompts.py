"""What is asked in a benchmark: the built-in prompts, written for this project. Plain text; knows nothing of models.

Six kinds, since what a drafter gains depends on the text: in `edit` and `summary` much of the answer stands in the
prompt already, `json` repeats its own keys, `code` is predictable line by line, `chat` and `reasoning` are not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt: a user turn, or plain text for a model without a chat template."""

    kind: str
    name: str
    """Unique in a set: says which one it is in errors and results."""
    text: str


KINDS = ("code", "edit", "json", "summary", "chat", "reasoning")

WARM_UP = "Name the days of the week, one a line."
"""Asked before anything is measured; of no kind."""

_SHOP = """\
from dataclasses import dataclass, field


@dataclass
class Item:
    name: str
    price: float
    count: int = 1


@dataclass
class Basket:
    items: list = field(default_factory=list)
    discount: float = 0.0

    def add(self, name, price, count=1):
        for item in self.items:
            if item.name == name and item.price == price:
                item.count = item.count + count
                return item
        item = Item(name, price, count)
        self.items.append(item)
        return item

    def remove(self, name, count=1):
        for item in self.items:
            if item.name == name:
                item.count = item.count - count
                if item.count <= 0:
                    self.items.remove(item)
                return True
        return False

    def total(self):
        total = 0.0
        for item in self.items:
            total = total + item.price * item.count
        return total * (1 - self.discount)

    def receipt(self):
        lines = []
        for item in self.items:
            lines.append(f"{item.count} x {item.name}: {item.price * item.count:.2f}")
        lines.append(f"Total: {self.total():.2f}")
        return "\\n".join(lines)
"""

_CONFIGURATION = """\
[server]
host = 0.0.0.0
port = 8080
workers = 4
timeout_seconds = 30
log_file = /var/log/harbour/server.log

[database]
host = db.internal
port = 5432
name = harbour
user = harbour_app
pool_size = 10
timeout_seconds = 30

[mail]
host = mail.internal
port = 587
sender = noreply@harbour.example
timeout_seconds = 30
retry_count = 3

[reports]
folder = /srv/harbour/reports
keep_days = 90
language = en
send_to = office@harbour.example
"""

_FERRY = """\
The ferry between Norvik and the island of Hest has sailed since 1911, and for most of that time it carried fish. The \
first boat, a steamer of nineteen metres called Trine, left Norvik at four in the morning, took on herring at the \
three landing places of Hest, and was back before the market opened. Passengers were an afterthought: they sat on the \
nets, and paid in coins that the mate kept in a tobacco tin.

That changed in 1958, when the fish-meal factory on Hest was built and two hundred people moved to the island. The \
county bought a second boat, Trine II, which had forty seats, a heated cabin and room for six cars. For twenty years \
she made eight crossings a day. In the winter of 1979 the sound froze for the first time in living memory, and the \
island was cut off for nineteen days; a helicopter brought flour, insulin and the post. The county council decided \
that this should not happen again and ordered Hestvik, a ferry with a strengthened bow, which entered service in 1982 \
and is still in use today.

The factory closed in 2004. Of the nine hundred people who lived on Hest then, some five hundred and twenty are left, \
and most of the passengers are now visitors who come for the bird cliffs between May and August. Hestvik carried \
141,000 passengers last year, four fifths of them in those four months. In January there are crossings with no \
passengers at all.

This is why the council's proposal has split the island. From next autumn, it would replace Hestvik by a battery \
ferry of half her size, with twelve crossings a day in summer and three in winter. It would save 11 million crowns a \
year. Those in favour say that a quieter boat without smoke suits the birds, and that the three winter crossings will \
at least be reliable. Those against point out that the new ferry has no strengthened bow. The council answers that \
the sound has not frozen since 1979; the islanders answer that it had not frozen before 1979 either.
"""

_MEETING = """\
Anna: Thanks for coming. Three things today: the release date, the failing import, and who covers support in July.
Boris: Can we start with the import? It is what everybody is waiting for.
Anna: Go ahead.
Boris: Since Tuesday the nightly import of the supplier catalogue stops after about 40,000 rows. The supplier started \
to send prices with a comma instead of a point, and our parser takes the row as broken. After a hundred broken rows \
it gives up, as it should.
Chen: So the data is fine, and only the number format is new?
Boris: Yes. I have a fix that accepts both, with tests. What I do not have is an answer on what to do with the prices \
of the last three nights, because the shop has been showing old ones.
Anna: How many products are affected?
Boris: 6,200 have a different price. For about 300 of them the difference is more than ten percent.
Chen: I would load the three missing nights today and send the list of the 300 to sales, so that they can check \
them before the weekend.
Anna: Agreed. Boris, please merge the fix today and load the missing nights. Chen, please send the list to sales. \
Next, the release. We had planned the 14th.
Chen: The new checkout is done, but the payment provider wants two weeks for their review, and they got our papers \
only yesterday. I cannot see how the 14th works.
Boris: We could release without the new checkout on the 14th, and bring it later behind a switch.
Anna: I would rather not do two releases in the holidays. Let us move everything to the 28th. Chen, please tell the \
provider that the 28th is fixed for us. Last one: support in July.
Boris: I am away from the 6th to the 17th.
Chen: I can do the first half if somebody takes the second.
Anna: Then Chen covers support until the 17th and Boris from the 18th on. I will put it in the calendar. Thank you.
"""

PROMPTS = (
    BenchPrompt(
        "code",
        "code-1",
        "Write a Python class `IntervalSet` that holds disjoint closed integer intervals, sorted by start. It has "
        "the methods add(start, end), which joins intervals that overlap or touch, remove(start, end), which may split "
        "an interval, and contains(value), which uses binary search. Give type hints and docstrings.",
    ),
    BenchPrompt(
        "code",
        "code-2",
        "Write a small command-line program in Python that reads a CSV file with the columns date, category, amount "
        "and prints for each month the total of each category as an aligned table, largest total first. Use argparse "
        "and the csv module, and end with one clear line on stderr if the file is missing or a row is broken.",
    ),
    BenchPrompt(
        "edit",
        "edit-1",
        "Add type hints to every function of this module, and rename the method `total` to `amount_due` wherever it "
        f"is used. Change nothing else. Answer with the whole module.\n\n```python\n{_SHOP}```\n",
    ),
    BenchPrompt(
        "edit",
        "edit-2",
        "In this configuration, set every timeout to 45 seconds, turn db.internal into db2.internal, and add the line "
        "`enabled = yes` as the first line of every section. Leave everything else as it is, and answer with the whole "
        f"file.\n\n```ini\n{_CONFIGURATION}```\n",
    ),
    BenchPrompt(
        "json",
        "json-1",
        "List the eight planets of the solar system as a JSON array of objects with the keys name, order_from_sun, "
        "kind, diameter_km, number_of_moons and has_rings. Answer with the JSON only.",
    ),
    BenchPrompt(
        "json",
        "json-2",
        "Turn these orders into a JSON array of objects with the keys order_id, customer, city, product, quantity, "
        "unit_price and shipped (true or false). Answer with the JSON only.\n\n"
        "1041: Lena Brandt in Kiel took 3 oil lamps at 24.50, shipped.\n"
        "1042: Omar Haddad in Bergen took 1 ship's clock at 189.00, not shipped yet.\n"
        "1043: Lena Brandt in Kiel took 12 candles at 1.75, shipped.\n"
        "1044: Priya Nair in Lisbon took 2 oil lamps at 24.50, not shipped yet.\n"
        "1045: Tom Okafor in Galway took 40 metres of rope at 0.95, shipped.\n"
        "1046: Omar Haddad in Bergen took 1 barometer at 74.00, shipped.\n",
    ),
    BenchPrompt(
        "summary",
        "summary-1",
        "Summarise this article in five sentences, and quote the sentence that best says what the islanders think of "
        f"the council's argument.\n\n{_FERRY}",
    ),
    BenchPrompt(
        "summary",
        "summary-2",
        "Write the minutes of this meeting: for each topic what was said in one or two sentences, then the decision, "
        f"then who does what until when.\n\n{_MEETING}",
    ),
    BenchPrompt(
        "chat",
        "chat-1",
        "My sourdough bread comes out flat and dense every time, though the starter bubbles nicely. What could be the "
        "reason, and what should I try first?",
    ),
    BenchPrompt(
        "chat",
        "chat-2",
        "Tell me a short story about a lighthouse keeper who finds a letter in a bottle, addressed to himself.",
    ),
    BenchPrompt(
        "reasoning",
        "reasoning-1",
        "A cyclist rides from A to B at 18 km/h and returns along the same road at 12 km/h. The whole trip takes 2 "
        "hours and 30 minutes, of which 15 minutes are a break at B. How far is it from A to B, and what was the "
        "average speed without the break? Think step by step.",
    ),
    BenchPrompt(
        "reasoning",
        "reasoning-2",
        "Four friends, Ida, Jo, Kim and Lou, live in four houses in a row, numbered 1 to 4. Ida lives next to Jo. Kim "
        "lives in an even-numbered house. Lou lives further left than Kim, and Jo does not live at an end of the row. "
        "Find every arrangement that is possible. Go through the cases one after the other.",
    ),
)  # fmt: skip
"""Two of each kind."""
