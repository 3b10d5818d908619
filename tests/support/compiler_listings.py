"""Output of ptxas and cuobjdump 13.5 for the forward kernel, d128, bf16.

The kernel's name is shortened, and most instructions of each basic block are omitted.
"""

# The prologue, the loop over tiles (0x1280) with the loop over key blocks (0x3ac0) inside, the
# producer warps (0xc3c0), and the waits, which lie after the kernel's end and jump back.
LISTING = """
Fatbin elf code:
================
arch = sm_90a

\tcode for sm_90a
\t.target\tsm_90a

\t\tFunction : forward_kernel
\t.headerflags\t@"EF_CUDA_ACCELERATORS EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/        LDC R1, c[0x0][0x28] ;  /* 0x00000a00ff017b82 */
                                        /* 0x000e240000000800 */
        /*0010*/        VIADD R1, R1, 0xffffffe0 ;
        /*0370*/        ULDC.64 UR32, c[0x0][0x208] ;
        /*0380*/   @!P0 BRA 0xc3c0 ;
        /*1270*/   @!P4 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR11+0x30040], RZ ;
        /*1280*/        UISETP.LT.AND UP0, UPT, UR27, UR24, UPT ;
        /*3aa0*/    @P0 BRA 0x79a0 ;
        /*3ac0*/    @P1 BRA 0x4620 ;
        /*3ad0*/        ULEA UR18, UR7, UR11, 0x3 ;
        /*3b10*/   @!P0 BRA 0xf810 ;
        /*3b20*/        S2R R14, SR_TID.X ;
        /*4620*/        IMAD.U32 R9, RZ, RZ, UR12 ;
        /*4720*/        WARPGROUP.ARRIVE ;
        /*4730*/        HGMMA.64x128x16.F32.BF16 R88, gdesc[UR20], RZ, !UPT ;
        /*4780*/        HGMMA.64x128x16.F32.BF16 R88, gdesc[UR20], R88 ;
        /*4960*/        HGMMA.64x128x16.F32.BF16 R88, gdesc[UR20], R88, gsb0 ;
        /*4980*/   @!P0 BRA 0xf870 ;
        /*4990*/        UIADD3 UR18, UR11, 0x20000, URZ ;
        /*49c0*/        WARPGROUP.ARRIVE ;
        /*4a90*/        HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR16].tnspB, R24, !UP0 ;
        /*4af0*/        HGMMA.64x128x16.F32.BF16 R24, R156, gdesc[UR16].tnspB, R24 ;
        /*4c90*/        HGMMA.64x128x16.F32.BF16 R24, R180, gdesc[UR16].tnspB, R24, gsb0 ;
        /*4cb0*/        WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*4cd0*/   @!P0 BRA P1, 0x5b30 ;
        /*5b30*/        FMNMX.FTZ R9, R88, R92, !PT ;
        /*7990*/   @!P0 BRA 0x3ac0 ;
        /*79a0*/    @P1 BRA 0x8500 ;
        /*8c40*/        HGMMA.64x128x16.F32.BF16 R88, gdesc[UR20], RZ, !UPT ;
        /*8e90*/   @!P0 BRA 0xfad0 ;
        /*8ea0*/        UIADD3 UR18, UR11, 0x20000, URZ ;
        /*8f60*/        HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR16].tnspB, R24, !UP0 ;
        /*90d0*/        HGMMA.64x128x16.F32.BF16 R24, R180, gdesc[UR16].tnspB, R24, gsb0 ;
        /*c350*/    @P0 BRA 0x1280 ;
        /*c3b0*/        EXIT ;
        /*c3c0*/        WARPSYNC.ALL ;
        /*c410*/        STL [R1+0x14], R2 ;
        /*c510*/        STL [R1+0xc], RZ ;
        /*c580*/        LDL R12, [R1] ;
        /*d620*/        STL [R1+0x8], R6 ;
        /*d720*/    @P0 BRA 0xc580 ;
        /*f680*/        EXIT ;
        /*f870*/        IMAD.U32 R12, RZ, RZ, UR31 ;
        /*f880*/        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R12+URZ+0x30020], R9 ;
        /*f890*/   @!P0 NANOSLEEP.SYNCS 0x989680 ;
        /*f8b0*/   @!P0 BRA 0xf870 ;
        /*f8c0*/        BRA 0x4990 ;
        /*fad0*/        IMAD.U32 R12, RZ, RZ, UR37 ;
        /*fb10*/   @!P0 BRA 0xfad0 ;
        /*fb20*/        BRA 0x8ea0 ;
        /*ff80*/        BRA 0xff80;
"""

# The loop over key blocks reloads a spilled register.
SPILLED = LISTING.replace(
    "        /*4990*/", "        /*4988*/        LDL R3, [R1+0xc] ;\n        /*4990*/"
)

REMARKS = """\
ptxas info    : 12 bytes gmem
ptxas info    : Compiling entry function 'forward_kernel' for 'sm_90a'
ptxas info    : Function properties for forward_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 16 barriers
ptxas info    : Compile time = 389.587 ms
"""

# Remarks about a kernel without the wait for the scores, and about one whose consumers have 160
# registers instead of 240.
ADVISORIES = {
    "C7511": "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline in the function "
    "'forward_kernel' in line 4975",
    "C7514": "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to non wgmma instructions reading accumulator registers of  a wgmma between "
    "start and end of the pipeline stage in the function 'forward_kernel' in line 0",
    "C7515": "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to non wgmma instructions defining accumulator registers of a wgmma between "
    "start and end of the pipeline stage in the function 'forward_kernel' in line 5372",
}
