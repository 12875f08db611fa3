# SPDX-License-Identifier: Apache-2.0
"""
The method in miniature: a planted world in which the truth of consistency is known, toy models of the real classes that
draw and see it, and the whole method in five steps over one folder.
"""
