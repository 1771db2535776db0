"""Metrics: how close a reconstruction is, what it gives away, what cannot be given away, and what a split costs.

image       MSE, PSNR, SSIM                              residual    what is known beyond the class; errors over their ceilings
lpips       distance in AlexNet's features               probes      attributes read from z or from a reconstruction
judge       independent networks: class and identity     bounds      certificates: what no attack can do
leakage     bits by the rate bound                       cost        parameters, multiply-adds, bytes
"""
