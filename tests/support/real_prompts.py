"""Prompts and texts for tests with trained weights."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are",
    "To make bread you need flour,",
    "In 1969, the first humans",
    "A binary search works by",
    "Dear Sir or Madam,\n\nI am writing to",
    "The opposite of hot is",
    "SELECT name, age FROM users WHERE",
    "My favourite season is autumn, because",
    "The speed of light is about",
    "Shakespeare wrote plays such as",
    "import numpy as np\n\nx = np.",
    "If it rains tomorrow, we will",
)

# A plain English text that no model has seen, for perplexities.
TEXT = """\
The ferry to the northern islands leaves twice a day, at seven in the morning and at four in the
afternoon, and the crew knows most of its passengers by name. On the morning of which I write
there were nine of us: a vet with two dogs that were not hers, a family of four who had missed the
boat of the day before, a surveyor, the woman who repairs the pianos of the church halls, and I.
The sea was grey and flat. The surveyor unfolded a map on the bench between us and explained that
the coast to the east loses about a metre every year, that the road behind the dunes would have to
move, and that nobody had yet said who would pay for it. "They will decide when the first house is
in the water," he said, "and then they will decide quickly and badly."

The piano tuner laughed. She had heard the same about the hall on the smallest island, whose roof
had leaked for as long as she had gone there. Every autumn she found the felt of the hammers damp,
every autumn she wrote it into her report, and every spring somebody thanked her for the report.
"An instrument forgives a great deal," she said. "It goes out of tune slowly and all together, so
that the people who sing beside it every week do not notice. Then a visitor comes with a flute,
and there is an argument about who is wrong."

I asked her how she knew where to begin, when everything was out by the same amount. She took a
fork from her coat, struck it on her knee and held it to the window, and the glass hummed. One
note had to come from outside, she said, and after that it was only patience: the fifths a little
narrow, the thirds a little wide, so that no key was perfect and every key could be used. The
children wanted to try the fork. By the time we passed the lighthouse they had found out that the
bench, the railing, the lid of the lunch box and the vet's larger dog all sounded different, and
that the dog did not care for it.

Behind the lighthouse the water turned a darker colour. The captain came down the stairs, looked
at the map over the surveyor's shoulder and put a finger on a shoal. That was drawn in the wrong
place, he said; it had moved two hundred metres since his father's time, and the buoy had moved
with it, but nobody had told the people who print the maps. The surveyor wrote it down with care.
They spoke for the rest of the crossing about sand, which, as far as I understood, is always on
its way to somewhere else.
"""
