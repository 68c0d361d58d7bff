"""`make demo`: two engines, one daemon; the second answers with the first one's KV.

handbook.py  the document and the questions
worker.py    an engine in a process of its own
engines.py   the demo's end of such a process
play.py      what happens, in which order
report.py    what came of it: plain values, written as JSON
claims.py    what the demo says, held against the report
table.py     the report for a person
"""
