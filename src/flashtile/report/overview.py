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
CLOSEST = 3  # rows of each question, where there is no loss


def overview(sections: Sequence[Section]) -> Section:
    comparisons = [x for section in sections for x in section.comparisons]
    by_question = {question: [x for x in comparisons if x.question == question] for question in QUESTIONS}
    plots, notes = [], []
    for question, (title, label) in QUESTIONS.items():
        some = by_question[question]
        short, words = answer(some)
        if some:
            plots.append(plot_of(some, question, f"{title} {short}.", label, words))
        else:
            notes.append(f"{title} {short}: {words}")
    lost = worse(comparisons)
    caption = f"{len(lost)} losses among {len(comparisons)} comparisons; the sections below have all of them."
    if not lost:
        comparisons = [x for some in by_question.values() for x in losses_first(some)[:CLOSEST]]
        caption = "No comparison is a loss; these come closest to one."
    return Section(
        name="overview",
        title="Is it faster, smaller, as exact here?",
        summary=RULE,
        plots=plots,
        tables=[table_of(lost or comparisons, caption)] if comparisons else [],
        notes=notes,
        records=[x.as_record() for some in by_question.values() for x in some],
    )
