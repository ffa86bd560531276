"""Inspection of labelled images: likely wrong labels, copies, lonely images, minor centres, unreadable files."""

from proxymetric.inspection.duplicates import find_duplicates, nearest_images, picture_of_rows
from proxymetric.inspection.lonely import find_lonely
from proxymetric.inspection.report import Inspection, inspect
from proxymetric.inspection.sub_centres import SubCentres, sub_centres
from proxymetric.inspection.wrong_labels import find_wrong_labels

__all__ = [
    "Inspection",
    "SubCentres",
    "find_duplicates",
    "find_lonely",
    "find_wrong_labels",
    "inspect",
    "nearest_images",
    "picture_of_rows",
    "sub_centres",
]
