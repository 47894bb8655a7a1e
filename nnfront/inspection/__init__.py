# SPDX-License-Identifier: Apache-2.0
"""Models as data for people: a page that shows one, and what differs between two.

model       a folder or an artefact, compiled, with what headers say of its weights: what all below reads
graphs      functions as graphs;  weights  where each weight comes from
page_data   all of that as one value, and who is in memory when;  write_page  that value in a page, made of the files in `page/`
compare     what differs between two models
"""
