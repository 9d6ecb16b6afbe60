from .attention import Mask as Mask
from .attention import attention as attention
