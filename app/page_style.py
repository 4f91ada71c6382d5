"""How the page looks: theme, style sheet and header; light and dark follow the visitor's system."""

from __future__ import annotations

import html

import gradio as gr

THEME = gr.themes.Base(
    primary_hue=gr.themes.colors.indigo, secondary_hue=gr.themes.colors.indigo, neutral_hue=gr.themes.colors.slate,
    font=["Inter", "system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], radius_size="lg",
).set(
    body_background_fill="*neutral_50", body_background_fill_dark="*neutral_950",
    block_background_fill="white", block_background_fill_dark="*neutral_900",
    block_border_width="1px", block_border_color="*neutral_200", block_border_color_dark="*neutral_800",
    body_text_color_subdued="*neutral_500", body_text_color_subdued_dark="*neutral_400",
    block_label_background_fill="*neutral_50", block_label_background_fill_dark="*neutral_800",
    block_label_border_width="0px", block_label_border_width_dark="0px",
    block_label_text_color="*neutral_600", block_label_text_color_dark="*neutral_300",
    block_title_text_color="*neutral_700", block_title_text_color_dark="*neutral_200", block_title_text_weight="600",
    button_primary_background_fill="linear-gradient(90deg, *primary_600, *primary_500)",
    button_primary_background_fill_hover="linear-gradient(90deg, *primary_700, *primary_600)",
    button_primary_background_fill_dark="linear-gradient(90deg, *primary_600, *primary_500)",
    button_primary_text_color="white", button_primary_text_color_dark="white",
)  # fmt: skip

CSS = """
.gradio-container .fillable {width: 100% !important; max-width: 1240px !important; margin: 0 auto !important}
.tab-container.visually-hidden {max-width: 100%; overflow: hidden}
.vs-head {display: flex; align-items: center; gap: .8rem; padding: .6rem 0; flex-wrap: wrap}
.vs-mark {width: 2.2rem; height: 2.2rem; border-radius: .6rem; display: grid; place-items: center; color: white;
  background: linear-gradient(135deg, var(--primary-600), #22b8a6)}
.vs-mark svg {width: 1.2rem; height: 1.2rem; fill: white}
.vs-name {font-size: 1.35rem; font-weight: 700; letter-spacing: -.02em; margin: 0 !important}
.vs-badge, .vs-chip {border: 1px solid var(--border-color-primary); border-radius: 999px; padding: .1rem .7rem;
  font-size: .85rem; color: var(--body-text-color-subdued); white-space: nowrap}
.vs-chips {display: flex; flex-wrap: wrap; gap: .4rem; margin-top: .3rem}
.vs-card {padding: .1rem 0 .3rem}
.vs-card p {margin: 0 0 .3rem; font-size: .92rem; color: var(--body-text-color-subdued)}
.vs-status {font-size: 1rem; min-height: 1.5rem; margin-bottom: .35rem}
.vs-failed {color: #c2261d} .dark .vs-failed {color: #ff8f87}
.vs-bar {height: .5rem; border-radius: .25rem; background: var(--neutral-200); overflow: hidden}
.dark .vs-bar {background: var(--neutral-700)}
.vs-fill {height: 100%; background: linear-gradient(90deg, var(--primary-600), #22b8a6); transition: width .2s}
.vs-empty {padding: 2rem 1rem; text-align: center; color: var(--body-text-color-subdued)}
.vs-title {font-weight: 600; margin: .2rem 0 .4rem}
.vs-report {overflow-x: auto}
.vs-report :is(thead, tbody, tr), .vs-stages :is(thead, tbody, tr) {border: 0 !important}
.vs-report table, .vs-stages table {border: 0 !important; border-collapse: collapse; width: 100%; margin: 0 0 .8rem}
.vs-report td, .vs-report th, .vs-stages td, .vs-stages th {border: 0 !important;
  padding: .3rem .9rem .3rem 0 !important; border-bottom: 1px solid var(--border-color-primary) !important;
  text-align: left; font-size: .9rem;
  vertical-align: top}
.vs-report th, .vs-stages th, .vs-report .vs-key td:first-child {color: var(--body-text-color-subdued);
  font-weight: 500; white-space: nowrap}
.vs-stages {overflow-x: auto}
.vs-stages td {font-variant-numeric: tabular-nums}
.vs-stages .vs-share {width: 40%; min-width: 6rem}
.vs-numbers {display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .8rem}
.vs-number {border: 1px solid var(--border-color-primary); border-radius: .8rem; padding: .8rem 1rem;
  background: var(--block-background-fill)}
.vs-number b {display: block; font-size: 1.7rem; letter-spacing: -.02em}
.vs-number span, .vs-note {margin-top: .5rem; font-size: .88rem; color: var(--body-text-color-subdued)}
.vs-legend {display: flex; align-items: center; gap: .6rem; font-size: .88rem; color: var(--body-text-color-subdued)}
.vs-ramp {flex: 0 0 8rem; height: .6rem; border-radius: .3rem;
  background: linear-gradient(90deg, #13122b, #3b3a91, #3e7dbe, #53c4ad, #faf0a0)}
.vs-media video {max-height: 460px; object-fit: contain}
#gallery .grid-wrap {min-height: 0 !important; height: auto !important}
#gallery .grid-container {grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)) !important}
.vs-map img {image-rendering: pixelated}
@media (max-width: 640px) {
  .gradio-container {padding: .5rem !important}
  .vs-name {font-size: 1.15rem}
  .vs-media video {max-height: 60vh}
  .vs-stages .vs-share {width: auto; min-width: 3rem}
  .vs-report td, .vs-report th, .vs-stages td, .vs-stages th {padding-right: .5rem !important}
}
"""
_BOLT = '<svg viewBox="0 0 24 24" fill="currentColor" aria-hidden="true"><path d="M13 2 4 14h6l-1 8 9-12h-6z"/></svg>'


def header_html(model: str) -> str:
    """Mark, name, and which model runs."""
    return (
        f'<div class="vs-head"><span class="vs-mark">{_BOLT}</span><h1 class="vs-name">videospark</h1>'
        f'<span class="vs-badge">{html.escape(model)}</span></div>'
    )


def empty_html(text: str) -> str:
    """In place of what is not there yet."""
    return f'<div class="vs-empty">{html.escape(text)}</div>'
