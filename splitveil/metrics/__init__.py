"""Metrics: pure functions of tensors. How close a reconstruction is, what it gives away, what cannot be given away, what a split
costs.

image       MSE, PSNR, SSIM                              residual    the error within a class
lpips       distance in AlexNet's features               probes      attributes read from z or from a reconstruction
leakage     bits by the rate bound                       bounds      what no attack can do
cost        parameters, multiply-adds, bytes
"""
