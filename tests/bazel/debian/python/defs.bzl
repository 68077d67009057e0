"""@rules_python's names for the rules that Bazel 4 has built in."""

py_binary = native.py_binary
py_library = native.py_library
py_test = native.py_test
