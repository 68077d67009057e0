"""Calls that must raise, as tables; test_bad_input.py runs them."""
