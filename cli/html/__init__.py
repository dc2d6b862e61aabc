"""A report as one page that needs nothing else: `render_page` (page.py), from plain values to text.

The values are those that `--json` prints, so a page can be made later of what was saved. One file a picture;
each returns its section: sentences, picture, table. Nothing here measures or reads files.
"""
