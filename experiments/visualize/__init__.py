"""The interactive page: a real engine's memory and batch, iteration by iteration.

`recorder.py` watches an engine from outside, `recording.py` makes what it saw small,
`scenes.py` says what is served, `timing.py` how fast, `simulations.py` what the sliders
show, and `page.py` puts all of it into one HTML file. The page's own sources are in
`web/`; what is built of them, by `scripts/build_page`, is in `data/`.
"""
