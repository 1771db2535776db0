"""Panels: the sections of the report, one template each, found because they lie here.

    panels/NAME.html    its first line is {# place 40: … #}; panels stand on the page in the order of their places
    panels/NAME.py      only if the template needs more than every panel has: context(runs) gives it, or None to hide the panel

Every panel has `runs`, `same_test`, `judged`, `worst_cases` and `flags`, which page.py explains, and page.py's filters.
"""
