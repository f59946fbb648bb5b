"""The first screen: is it faster, smaller, as exact here? Three answers, three pictures, and every loss in one table.

It measures nothing and uses the comparisons of the other sections.
"""

from collections.abc import Sequence

from .section import Section
from .tables import plot_of, table_of
from .verdict import RULE, answer, losses_first, worse

QUESTIONS = {
    "speed": ("Is it faster?", "times the speed of the fastest other"),
    "memory": ("Is it smaller?", "times as small as the smallest other"),
    "error": ("Is it as exact?", "times as exact as the most exact other"),
}
CLOSEST = 3  # of each question, where there is no loss


def overview(sections: Sequence[Section]) -> Section:
    found = [x for section in sections for x in section.comparisons]
    asked = {question: [x for x in found if x.question == question] for question in QUESTIONS}
    plots, notes = [], []
    for question, (title, label) in QUESTIONS.items():
        some = asked[question]
        short, words = answer(some)
        if some:
            plots.append(plot_of(some, question, f"{title} {short}.", label, words))
        else:
            notes.append(f"{title} {short}: {words}")
    lost = worse(found)
    caption = f"{len(lost)} losses among {len(found)} comparisons; the sections below have all of them."
    if not lost:
        found = [x for some in asked.values() for x in losses_first(some)[:CLOSEST]]
        caption = "No comparison is a loss; these come closest to one."
    return Section(
        name="overview",
        title="Is it faster, smaller, as exact here?",
        summary=RULE,
        plots=plots,
        tables=[table_of(lost or found, caption)] if found else [],
        notes=notes,
        records=[x.as_record() for some in asked.values() for x in some],
    )
