# SPDX-License-Identifier: Apache-2.0
"""Plot the curves of a run, sheets of images, and the errors of a judge."""
