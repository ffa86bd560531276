"""Linear heads in closed form: computed from sums over the features of labelled images, without training."""

from proxymetric.closed_forms.head import Form as Form
from proxymetric.closed_forms.head import LinearHead as LinearHead
from proxymetric.closed_forms.lda import LDA as LDA
from proxymetric.closed_forms.scatter import Scatter as Scatter
from proxymetric.closed_forms.unchanged import Unchanged as Unchanged
from proxymetric.closed_forms.whitening import Whitening as Whitening

__all__ = ["LDA", "Form", "LinearHead", "Scatter", "Unchanged", "Whitening"]
