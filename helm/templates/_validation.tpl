{{/* What a schema can't say: rules between values. Each message names the value and the fix. */}}
{{- define "medusa-gateway.validate" -}}
{{- $most := ternary .Values.autoscaling.maxReplicas .Values.replicaCount .Values.autoscaling.enabled | int -}}
{{- if and (eq .Values.redis.mode "embedded") (gt $most 1) }}
{{- fail (printf "redis.mode is embedded, which is one server for each pod, and there may be %d pods: set redis.mode to bundled or external, so that they share statistics and limits (or to memory, so that they share nothing)" $most) }}
{{- end }}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- fail (printf "autoscaling.minReplicas (%d) is over autoscaling.maxReplicas (%d): lower the one or raise the other" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- end }}
{{- if and (eq (toString .Values.rollout.maxSurge) "0") (eq (toString .Values.rollout.maxUnavailable) "0") }}
{{- fail "rollout.maxSurge and rollout.maxUnavailable are both 0, so no pod could ever be replaced: raise one of them" }}
{{- end }}
{{- if and (eq .Values.auth.mode "secret") (not .Values.auth.secret.name) }}
{{- fail "auth.mode is secret: set auth.secret.name to the Secret that holds the key file (make one with 'medusa-gateway keys new')" }}
{{- end }}
{{- if and (ne .Values.auth.mode "secret") .Values.auth.secret.name }}
{{- fail (printf "auth.secret.name is set, but auth.mode is %s: set it to secret" .Values.auth.mode) }}
{{- end }}
{{- if and .Values.policy.content .Values.policy.existingConfigMap }}
{{- fail "policy.content and policy.existingConfigMap are both set: give the policy in one place" }}
{{- end }}
{{- if and .Values.backends.content .Values.backends.existingConfigMap }}
{{- fail "backends.content and backends.existingConfigMap are both set: give the backends in one place" }}
{{- end }}
{{- if include "medusa-gateway.backendsConfigMap" . }}
{{- range $name, $value := dict "model.name" .Values.model.name "model.heads" .Values.model.heads "model.servedName" .Values.model.servedName "model.maxLength" .Values.model.maxLength "model.dtype" (trimPrefix "auto" .Values.model.dtype) "limits.maxRunning" .Values.limits.maxRunning "limits.kvTokens" .Values.limits.kvTokens }}
{{- if $value }}
{{- fail (printf "%s describes one engine, and backends describes all: say it in the backends file" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .Values.redis.mode "external" }}
{{- with .Values.redis.external }}
{{- if and .urlSecret.name (or .hosts .service .username .passwordSecret.name) }}
{{- fail "redis.external.urlSecret holds the whole URL: leave hosts, service, username and passwordSecret empty, or leave urlSecret.name empty" }}
{{- end }}
{{- if not (or .urlSecret.name .hosts) }}
{{- fail "redis.mode is external, but no server is named: set redis.external.hosts, or redis.external.urlSecret.name" }}
{{- end }}
{{- if and (eq .kind "sentinel") (not .service) (not .urlSecret.name) }}
{{- fail "redis.external.kind is sentinel: set redis.external.service to the name that the Sentinels watch" }}
{{- end }}
{{- if and (eq .kind "standalone") (gt (len .hosts) 1) }}
{{- fail "redis.external.kind is standalone, which is one host: name one in redis.external.hosts, or set kind to sentinel or cluster" }}
{{- end }}
{{- if and (eq .kind "cluster") (int .database) }}
{{- fail "redis.external.kind is cluster, which has no databases: set redis.external.database to 0" }}
{{- end }}
{{- if and .tls.caSecret.name (not .tls.enabled) }}
{{- fail "redis.external.tls.caSecret is set, but TLS is off: set redis.external.tls.enabled to true" }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.model.volume.existingClaim .Values.model.volume.hostPath }}
{{- fail "model.volume.existingClaim and model.volume.hostPath are both set: the model lies in one of them" }}
{{- end }}
{{- if and (eq .Values.cache.type "hostPath") (not .Values.cache.hostPath) }}
{{- fail "cache.type is hostPath: set cache.hostPath to a folder that user podSecurityContext.runAsUser may write to" }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: name the Gateway that the route attaches to" }}
{{- end }}
{{- end }}
