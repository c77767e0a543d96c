// Every variant of the kernels has its own name behind the names of its functions, so that one library holds them all:
// mg_forward of the variant "avx2" is mg_forward_avx2.
#pragma once

#define MG_JOINED(name, variant) name##_##variant
#define MG_NAMED(name, variant) MG_JOINED(name, variant)
#define VARIANT(name) MG_NAMED(name, MG_VARIANT)

#define mg_argmax VARIANT(mg_argmax)
#define mg_copy_slots VARIANT(mg_copy_slots)
#define mg_forward VARIANT(mg_forward)
#define mg_heads_follow VARIANT(mg_heads_follow)
#define mg_heads_logits VARIANT(mg_heads_logits)
#define mg_layout VARIANT(mg_layout)
#define mg_model_fault VARIANT(mg_model_fault)
#define mg_pool_free VARIANT(mg_pool_free)
#define mg_pool_new VARIANT(mg_pool_new)
#define mg_project VARIANT(mg_project)
#define mg_sample VARIANT(mg_sample)
#define mg_top_k VARIANT(mg_top_k)
#define mg_workspace_free VARIANT(mg_workspace_free)
#define mg_workspace_new VARIANT(mg_workspace_new)
