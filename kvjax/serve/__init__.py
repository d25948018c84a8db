"""Serving: systems as sentences, the policies that make up one, and the loop that runs them.

A policy is a pure function from a `View` to a `Plan`. The loop yields what is to be done and does nothing
itself; `sim` adds up its seconds. What is kept of a past is decided by methods (`kvjax.methods`), never here.
"""
