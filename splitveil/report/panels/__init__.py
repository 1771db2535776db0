"""Panels: the sections of the report, one template each, found because they lie here.

    panels/NAME.html    its first line is {# place 40: … #}; panels stand on the page in the order of their places
    panels/NAME.py      only if the template needs more than every panel has: context(runs) gives it, or None to hide the panel

Every panel has `runs`, `same_test`, `judged` and `flags`, which page.py makes, its filters, and the tables of table.html. The
<h2 id="…"> of a panel stands in the list of contents. An audit has no training: whoever needs what is not there hides the panel.
"""
