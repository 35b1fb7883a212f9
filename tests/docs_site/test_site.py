"""A site of two pages, built with the hooks of the real one."""

from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

HOOKS = Path(__file__).parents[2] / "docs_site" / "hooks.py"

CONFIG = f"""
site_name: two pages
theme: {{name: null, custom_dir: theme}}
use_directory_urls: false
hooks: [{HOOKS}]
plugins: []
markdown_extensions: [attr_list, pymdownx.highlight, pymdownx.superfences]
strict: true
validation: {{links: {{anchors: warn}}}}
nav: [index.md, Other: sub/other.md]
"""
FIRST = """
# First

So $x_1 \\le y$, `$not this$`; see [the other](sub/other.md#part).

```python
x = 20
print("one", x)
x + 1
```

```text
old
```
"""
SECOND = """
# Other

## Part

```python picture="A line that rises"
from matplotlib.figure import Figure
figure = Figure(figsize=(2, 1))
figure.subplots().plot([0, 1])
print("x" in globals())
```
"""


@pytest.fixture
def site(tmp_path):
    """The folder of the site once it is built from these two pages."""
    (tmp_path / "theme").mkdir()
    (tmp_path / "theme" / "main.html").write_text("<title>x</title>\n{{ page.content }}")
    (tmp_path / "mkdocs.yml").write_text(CONFIG)
    (tmp_path / "docs" / "sub").mkdir(parents=True)

    def make(first=FIRST, second=SECOND):
        (tmp_path / "docs" / "index.md").write_text(first)
        (tmp_path / "docs" / "sub" / "other.md").write_text(second)
        build(load_config(str(tmp_path / "mkdocs.yml")))
        return tmp_path / "site"

    return make


def test_outputs_formulas_and_pictures_are_in_the_pages(site):
    folder = site()
    first = (folder / "index.html").read_text()
    assert "one 20\n21" in first
    assert "old" not in first
    assert first.count("<math") == 1
    assert "$not this$" in first
    second = (folder / "sub" / "other.html").read_text()
    assert "False" in second  # a page knows nothing of the one before
    assert 'alt="A line that rises"' in second
    assert 'src="other-1.svg"' in second
    assert (folder / "sub" / "other-1.svg").read_text().startswith("<svg")
    assert (folder / "site.css").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```python\n1 / 0\n```", "sub/other.md, block 1 (line 4): ZeroDivisionError"),
        ("```python\nexit(0)\n```", "sub/other.md, block 1 (line 4): SystemExit: 0"),
        ("<!-- bench: nothing -->", "there is no benchmark 'nothing'"),
        ("<!-- ledger: D-E1 -->", "the ledger has no parts, got 'D-E1'"),
        ("<!-- house: nn -->", "the house has no parts, got 'nn'"),
        ("So $\\foo$.", "sub/other.md: no MathML for $\\foo$"),
        ("$$\n\\foo x\n$$", "sub/other.md: no MathML for $\\foo x$"),
        ("$$\n\nx\n\n$$", "sub/other.md: no formula from '$$'"),
    ],
)
def test_an_error_in_a_page_stops_the_build_and_is_told(site, caplog, text, told):
    with pytest.raises(Abort):
        site(second=f"# Other\n\n{text}\n")
    assert told in caplog.text
    assert "sub/other.md" in caplog.text


@pytest.mark.parametrize(
    "marker",
    [
        *(
            "<!-- Ledger -->",
            "<!-- bench:maps -->",
            "<!-- House -->",
            "<!--ledger-->",
            "<!-- api : fenchel -->",
        ),
        *(
            "  <!-- ledger -->",
            "See <!-- ledger -->",
            "<!-- benchmark: maps -->",
            "<!--- ledger -->",
        ),
        *("<!-- bench: maps attention -->", "<!--\napi: fenchel\n-->"),
    ],
)
def test_a_misspelt_marker_stops_the_build(site, caplog, marker):
    with pytest.raises(Abort):
        site(second=f"# Other\n\n{marker}\n")
    assert f"sub/other.md: {marker.removeprefix('See ').strip()!r} is no marker" in caplog.text
    assert "line 3" in caplog.text


def test_other_comments_and_markers_that_are_shown_are_kept(site):
    shown = "```text\n<!-- ledger -->\n<!-- Bench -->\n```"
    folder = site(second=f"# Other\n\n## Part\n\n<!-- Words -->\n\n`<!-- Api -->`\n\n{shown}\n")
    text = (folder / "sub" / "other.html").read_text()
    assert "<!-- Words -->" in text
    assert all(f"&lt;!-- {word} --&gt;" in text for word in ("Api", "ledger", "Bench"))


def test_the_ledger_of_the_site_is_put_in_and_its_anchors_are_known(site):
    link = "[one](sub/other.md#D-E13)"
    folder = site(f"# First\n\n{link}\n", "# Other\n\n<!-- ledger -->\n")
    assert 'id="D-E13"' in (folder / "sub" / "other.html").read_text()


@pytest.mark.parametrize("target", ["sub/other.md#nowhere", "sub/nothing.md"])
def test_a_link_that_leads_nowhere_stops_the_build(site, target):
    with pytest.raises(Abort):
        site(first=f"# First\n\n[gone]({target})\n")
