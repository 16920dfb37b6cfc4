"""The demo's document, and questions that it answers."""

_TEXT = """\
The Lighthouse at Skerrin Point

The lighthouse at Skerrin Point was built by Agnes Thorne. She was an engineer, and she was 29
years old when the work began. She had never built a lighthouse before. The tower is 34 metres
high, and it is built of grey granite. The granite was cut on the mainland, numbered stone by
stone, and brought across the bay in flat boats. An older tower of brick had stood on the same
rock. It fell in the great storm of 1868.

The work took three summers. In winter the sea was too rough, and the men went home to their
farms. In the first summer they cut steps into the rock and laid the foundation. In the second
summer the tower grew to half its height. In the third summer the lamp room was set on top. When
the lamp was lit for the first time, the whole village stood on the beach to see it, and the
church bell rang for an hour.

The first lamp burned whale oil. The keeper carried the oil up 168 steps in copper cans, and the
lamp had to be filled every four hours, day and night. Later the whale oil was replaced by
paraffin, which was cheaper and gave a whiter light. Then came an electric lamp. A diesel engine
in a shed behind the tower made the current. Today the lamp is powered by solar panels on the
roof of the old oil store, and the engine is only started in the darkest weeks of winter.

The light flashes twice every fifteen seconds. Sailors know it by this rhythm, because no other
light on the coast has the same one. In clear weather the light can be seen from 21 miles away.
In fog it cannot be seen at all, and so the station also has a horn. The horn sounds once every
minute. The people of the village say that after a few years they no longer hear it, and that
visitors hear nothing else.

The lens is the pride of the station. The lens was made in Paris. The lens weighs two tons, and
it floats in a bath of mercury, so that a child could turn it with one finger. It has more than
a thousand pieces of glass. Every piece is cleaned with vinegar and a soft cloth. This is done
once a year, in May, and it takes four days. The lens was damaged only once, by a seagull that
flew through an open window and broke a piece of glass.

Twelve keepers have lived at Skerrin Point. Tomas Hale stayed longest. He kept the light for 41
years. He wrote down the weather every morning at six o'clock, and his books are still read by
people who study the climate. He lived in the keeper's house with his wife Ingrid, four
children, many chickens, and a cow. The cow was called Duchess. In one storm she was brought
into the kitchen of the house, and she stayed there for three nights.

The rock is small, but it was never empty. Behind the tower a wall of loose stone keeps the wind
from a garden, where the keepers grew potatoes, cabbages and onions. The soil was carried over
from the village in baskets, a little on every trip of the boat. Letters, flour and newspapers
came once a week, if the sea allowed it. In the winter of 1947 it did not allow it for 31 days,
and the family lived on potatoes and eggs. The children had lessons at the kitchen table. On
Sundays all of them went up to the lamp room, because from there the church in the village could
be seen, and on still days the bell could be heard across the water.

The most famous night in the history of the station was a night in February. A steamer had lost
her rudder in a gale and was driven toward the rocks with 63 people on board. Tomas Hale saw her
rockets at midnight. He could not launch the boat alone, so his daughter Ellen rowed with him.
She was sixteen years old. They went out four times. At sunrise all 63 people sat in the
keeper's house and ate soup, which Ingrid had cooked in the washing kettle. The king gave Ellen
a silver medal. She used the medal as a paperweight for the rest of her life.

The last keeper left when the light became automatic. A computer on the mainland now watches the
lamp, and a technician comes by boat every three months. The keeper's house is now a small
museum. The museum is open from April to September. Visitors can climb the steps, see the lens,
and read the weather books of Tomas Hale. A ticket costs five pounds, and children pay nothing.
Most visitors ask the same question: was it lonely? The guide always gives the answer of the
last keeper, who said that nobody is lonely who is needed by every ship that passes.
"""
# Line breaks exist only in the source: a small model takes one within a sentence for its end.
DOCUMENT = "\n\n".join(" ".join(paragraph.split()) for paragraph in _TEXT.split("\n\n"))

QUESTIONS = (
    "Who built the lighthouse?",
    "How long did the work take?",
    "What did the first lamp burn?",
    "How far away can the light be seen?",
    "Where was the lens made?",
    "What did the king give Ellen?",
    "What is the keeper's house now?",
    "How much does a ticket cost?",
)
